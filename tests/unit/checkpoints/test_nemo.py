"""A tiny SDXL through the whole way: written, opened, compared, and refused for every reason there is."""

import io
import math
import tarfile

import pytest
import torch
import yaml

from sd_quant.checkpoints.nemo import open_nemo, write_nemo
from sd_quant.checkpoints.nemo_networks import denoiser_sigmas, read_config
from sd_quant.checkpoints.synthetic import write_synthetic
from sd_quant.errors import ArtifactError
from sd_quant.files import sha256
from sd_quant.files.archive import whole_file
from sd_quant.files.checks import check_finite
from sd_quant.models.sdxl_nemo import scheduler
from sd_quant.names import nemo as nemo_keys
from tests.networks import assert_same, built_networks

pytestmark = [pytest.mark.commit, pytest.mark.slow]

UNET = nemo_keys.PREFIX["unet"]


@pytest.fixture(scope="module")
def content(tiny_nemo) -> tuple[dict, dict[str, torch.Tensor]]:
    with tarfile.open(tiny_nemo) as tar:
        config = yaml.safe_load(tar.extractfile("./model_config.yaml").read())
        return config, torch.load(io.BytesIO(tar.extractfile("./model_weights.ckpt").read()), weights_only=True)


@pytest.fixture
def written(tmp_path):
    """Writes a folder like an extracted archive, with plain yaml and torch."""

    def write(config: dict, state: dict[str, torch.Tensor]):
        (tmp_path / "model_config.yaml").write_text(yaml.safe_dump(config))
        torch.save(state, tmp_path / "model_weights.ckpt")
        return tmp_path

    return write


def assert_same_modules(built, expected):
    assert built.keys() == expected.keys()
    for component, module in expected.items():
        assert_same(built[component].state_dict(), module.state_dict())


def test_round_trip_is_bit_exact_and_the_networks_run(tiny_nemo, tiny_config, tiny_modules):
    checkpoint = open_nemo(tiny_nemo)
    assert checkpoint.model_config == tiny_config
    modules = built_networks(checkpoint)
    assert_same_modules(modules, tiny_modules)
    for module in modules.values():
        assert not module.training and not any(parameter.requires_grad for parameter in module.parameters())
        assert not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    ids = torch.arange(16)[None] + 80
    with torch.inference_mode():
        for name in ("text_encoder", "text_encoder_2"):
            assert torch.equal(modules[name](ids)[0], tiny_modules[name](ids)[0]), name
        image = modules["vae"].decode(torch.ones(1, 4, 4, 4)).sample
        assert image.shape == (1, 3, 8, 8) and image.isfinite().all()


def test_channels_last_weights_are_written_in_order(tmp_path, tiny_config, tiny_modules, tiny_nemo):
    unet = built_networks(open_nemo(tiny_nemo))["unet"].to(memory_format=torch.channels_last)
    write_nemo(tmp_path / "a.nemo", tiny_config, tiny_modules | {"unet": unet}, torch.float32)
    assert sha256(tmp_path / "a.nemo") == sha256(tiny_nemo)


def test_archive_holds_what_nemo_expects(tiny_nemo, content):
    with tarfile.open(tiny_nemo, "r:") as tar:
        assert tar.getnames() == ["./model_config.yaml", "./model_weights.ckpt"]
    _, state = content
    assert all(key.startswith((*nemo_keys.PREFIX.values(), "model.denoiser.")) for key in state)
    assert state[nemo_keys.SIGMAS].dtype == torch.float32 and state[nemo_keys.SIGMAS].shape == (1000,)
    assert state[nemo_keys.LOGIT_SCALE].item() == pytest.approx(math.log(1 / 0.07))


def test_sigmas_are_those_of_the_scheduler():
    alphas = scheduler().alphas_cumprod.double()
    torch.testing.assert_close(denoiser_sigmas({}), ((1 - alphas) / alphas).sqrt().float(), rtol=2e-4, atol=0)
    assert denoiser_sigmas({})[0].item() == pytest.approx(0.02917, abs=1e-5)  # SD's well-known bounds
    assert denoiser_sigmas({})[-1].item() == pytest.approx(14.6146, abs=1e-4)


def test_known_variants_of_keys_and_config(written, content, tiny_modules):
    config, state = content
    compiled = {key.replace("diffusion_model.", "diffusion_model._orig_mod."): tensor for key, tensor in state.items()}
    wrapped = {key.replace("model.", "model.module.", 1): tensor for key, tensor in compiled.items()}
    ids = "model.module.conditioner.embedders.0.transformer.text_model.embeddings.position_ids"
    del wrapped["model.module.denoiser.sigmas"]
    path = written({"model": config}, wrapped | {ids: torch.arange(16)[None]})
    assert_same_modules(built_networks(open_nemo(path)), tiny_modules)


def refusal(path) -> str:
    with pytest.raises(ArtifactError) as caught:
        open_nemo(path)
    return str(caught.value)


def test_missing_unknown_and_misshapen_keys_are_counted_and_named(written, content):
    config, state = content
    state = {key: tensor for key, tensor in state.items() if ".transformer_blocks.1." not in key}
    state |= {"model.stranger\n": torch.ones(1), UNET + "input_blocks.0.0.weight": torch.ones(32, 4, 1, 1)}
    message = refusal(written(config, state))
    # the second block of 4 transformers (1 down, 1 middle, 2 up) has 20 weights
    assert "80 missing: model.model.diffusion_model." in message and "and 70 more" in message
    assert r"1 unknown: model.stranger\n" in message
    assert f"1 misshapen: {UNET}input_blocks.0.0.weight [32, 4, 1, 1] instead of [32, 4, 3, 3]" in message


def test_a_cut_archive_is_an_error_before_and_after_it_is_opened(tmp_path, tiny_nemo):
    path = tmp_path / "copy.nemo"
    path.write_bytes(tiny_nemo.read_bytes())
    checkpoint = open_nemo(path)
    with path.open("r+b") as file:
        file.truncate(10_000)
    with pytest.raises(ArtifactError, match="became shorter"):
        built_networks(checkpoint)
    assert "cut" in refusal(path)


def test_weights_of_no_network_are_refused(written, content):
    config, state = content
    encoder, key = nemo_keys.PREFIX["text_encoder_2"], UNET + "out.0.weight"
    wrapped = {key.replace("model.", "model.module.", 1): state[key]}
    assert "plain and wrapped" in refusal(written(config, state | wrapped))
    assert "text encoders" in refusal(written(config, {k: v for k, v in state.items() if not k.startswith(encoder)}))
    message = refusal(written(config, state | {key: state[key].to(torch.int8)}))
    assert key in message and "torch.int8" in message
    assert "does not describe an SDXL" in refusal(written({}, state))
    assert "is_legacy is True, expected False" in refusal(written(config | {"is_legacy": True}, state))
    sigmas = {nemo_keys.SIGMAS: 1.01 * state[nemo_keys.SIGMAS]}
    assert f"{nemo_keys.SIGMAS} are not those of denoiser_config" in refusal(written(config, state | sigmas))


@pytest.mark.parametrize(
    ("component", "key", "value"), [("unet", "out.1.bias", math.nan), ("text_encoder_2", "text_projection", math.inf)]
)
def test_values_that_are_not_finite_are_named(written, content, component, key, value):
    config, state = content
    broken = state[nemo_keys.PREFIX[component] + key].clone()
    broken.view(-1)[1] = value
    checkpoint = open_nemo(written(config, state | {nemo_keys.PREFIX[component] + key: broken}))
    with pytest.raises(ArtifactError, match=f"{key}' of the {component} holds 1 NaN or infinite"):
        check_finite(checkpoint.components[component])
    check_finite(checkpoint.components["vae"])


@pytest.mark.parametrize(
    "config, message",
    [
        (b"- 1\n- 2\n", "holds a list"),
        (b"a: !!python/object/apply:os.mkdir [canary]", "not plain YAML"),
        (b"#" * (2**20 + 1), "expected at most 1048576"),
    ],
)
def test_configs_that_are_not_plain_yaml(tmp_path, monkeypatch, config, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_config.yaml").write_bytes(config)
    with pytest.raises(ArtifactError, match=message):
        read_config(whole_file(tmp_path / "model_config.yaml"))
    assert not (tmp_path / "canary").exists()
    assert "holds no model_weights.ckpt but model_config.yaml" in refusal(tmp_path)  # as a model-parallel checkpoint


def test_full_size_is_that_of_sdxl_base(full_size_shapes):
    assert {name: sum(map(math.prod, shapes.values())) for name, shapes in full_size_shapes.items()} == {
        "unet": 2_567_463_684,
        "vae": 83_653_863,
        "text_encoder": 123_060_480,
        "text_encoder_2": 694_659_840,
    }


def test_the_seed_decides_every_byte_of_a_synthetic_checkpoint(tmp_path, tiny_config, tiny_texts):
    half, again, single = (tmp_path / f"{name}.nemo" for name in ("half", "again", "single"))
    for path, dtype, seed in ((half, torch.float16, 0), (again, torch.float16, 0), (single, torch.float32, 1)):
        write_synthetic(path, dtype, seed, tiny_config, *tiny_texts)
    assert again.read_bytes() == half.read_bytes()
    checkpoint, other = open_nemo(half), open_nemo(single)
    for opened, dtype in ((checkpoint, torch.float16), (other, torch.float32)):
        for source in opened.components.values():
            check_finite(source)
            assert {parameter.dtype for parameter in source.parameters.values()} == {dtype}
    unet, another = checkpoint.components["unet"], other.components["unet"]
    assert not any(torch.equal(unet[name], another[name].half()) for name in unet)
