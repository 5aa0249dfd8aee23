"""A tiny SDXL through the whole way: written, opened, compared, and refused for every reason there is."""

import gzip
import io
import math
import tarfile

import pytest
import torch
import yaml

from sd_quant.checkpoints import nemo_keys
from sd_quant.checkpoints.checks import check_finite
from sd_quant.checkpoints.nemo import open_nemo, write_nemo
from sd_quant.checkpoints.nemo_keys import denoiser_sigmas
from sd_quant.checkpoints.tensors import StoredTensor
from sd_quant.errors import ArtifactError
from sd_quant.files import sha256
from tests.networks import built_networks


def read_archive(path) -> tuple[dict, dict[str, torch.Tensor]]:
    with tarfile.open(path) as tar:
        config = yaml.safe_load(tar.extractfile("./model_config.yaml").read())
        return config, torch.load(io.BytesIO(tar.extractfile("./model_weights.ckpt").read()), weights_only=True)


@pytest.fixture
def repack(tmp_path, tiny_nemo):
    """Writes the tiny archive with plain tarfile and torch after ``change(config, state)``."""

    def write(change) -> io.BytesIO:
        config, state = read_archive(tiny_nemo)
        change(config, state)
        weights = io.BytesIO()
        torch.save(state, weights)
        path = tmp_path / "changed.nemo"
        contents = {"./model_config.yaml": yaml.safe_dump(config).encode(), "./model_weights.ckpt": weights.getvalue()}
        with tarfile.open(path, "w:") as tar:
            for name, content in contents.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        return path

    return write


def assert_same_modules(built, expected, dtype=torch.float32):
    assert built.keys() == expected.keys()
    for component, module in expected.items():
        found = built[component].state_dict()
        assert found.keys() == module.state_dict().keys()
        for name, tensor in module.state_dict().items():
            assert torch.equal(found[name], tensor.to(dtype)), (component, name)


def test_round_trip_is_bit_exact(tiny_nemo, tiny_config, tiny_modules):
    checkpoint = open_nemo(tiny_nemo)
    assert checkpoint.model_config == tiny_config
    assert_same_modules(built_networks(checkpoint), tiny_modules)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_kept_as_stored(tmp_path, tiny_config, tiny_modules, dtype):
    path = tmp_path / "half.nemo"
    write_nemo(path, tiny_config, tiny_modules, dtype)
    checkpoint = open_nemo(path)
    unet = checkpoint.components["unet"]
    assert unet["conv_in.weight"].dtype == unet.parameters["conv_in.weight"].dtype == dtype
    assert_same_modules(built_networks(checkpoint, dtype), tiny_modules, dtype)


def test_channels_last_weights_are_written_in_order(tmp_path, tiny_config, tiny_modules, tiny_nemo):
    unet = built_networks(open_nemo(tiny_nemo))["unet"].to(memory_format=torch.channels_last)
    path = tmp_path / "channels_last.nemo"
    write_nemo(path, tiny_config, tiny_modules | {"unet": unet}, torch.float32)
    assert sha256(path) == sha256(tiny_nemo)


def test_archive_holds_what_nemo_expects(tiny_nemo):
    with tarfile.open(tiny_nemo, "r:") as tar:
        assert tar.getnames() == ["./model_config.yaml", "./model_weights.ckpt"]
    _, state = read_archive(tiny_nemo)
    prefixes = (*nemo_keys.PREFIX.values(), "model.denoiser.")
    assert all(key.startswith(prefixes) for key in state)
    assert state[nemo_keys.SIGMAS].dtype == torch.float32 and state[nemo_keys.SIGMAS].shape == (1000,)
    assert state[nemo_keys.LOGIT_SCALE].item() == pytest.approx(math.log(1 / 0.07))


def test_sigmas_are_those_of_the_scheduler(tiny_nemo):
    from sd_quant.models.sdxl_nemo import scheduler

    alphas = scheduler().alphas_cumprod.double()
    torch.testing.assert_close(denoiser_sigmas(1000), ((1 - alphas) / alphas).sqrt().float(), rtol=2e-4, atol=0)
    assert denoiser_sigmas(1000)[0].item() == pytest.approx(0.02917, abs=1e-5)  # SD's well-known bounds
    assert denoiser_sigmas(1000)[-1].item() == pytest.approx(14.6146, abs=1e-4)


def test_built_modules_run_and_learn_nothing(tiny_nemo, tiny_modules):
    modules = built_networks(open_nemo(tiny_nemo))
    ids = torch.arange(16)[None] + 80
    for module in modules.values():
        assert not module.training and not any(parameter.requires_grad for parameter in module.parameters())
        assert not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    with torch.inference_mode():
        for name in ("text_encoder", "text_encoder_2"):
            assert torch.equal(modules[name](ids)[0], tiny_modules[name].eval()(ids)[0]), name
        image = modules["vae"].decode(torch.ones(1, 4, 4, 4)).sample
        assert image.shape == (1, 3, 8, 8) and image.isfinite().all()


def test_weights_are_read_when_asked_for(tiny_nemo, tiny_modules):
    unet = open_nemo(tiny_nemo).components["unet"]
    assert list(unet) == [name for name, _ in tiny_modules["unet"].named_parameters()]
    assert unet.parameters["conv_in.weight"].shape == (32, 4, 3, 3)
    assert torch.equal(unet["conv_in.weight"], tiny_modules["unet"].conv_in.weight)
    with pytest.raises(KeyError):
        unet["absent"]


def test_asking_for_a_name_reads_nothing(tiny_nemo, monkeypatch):
    unet = open_nemo(tiny_nemo).components["unet"]
    monkeypatch.setattr(StoredTensor, "read", lambda tensor: pytest.fail("a weight was read"))
    assert "conv_in.weight" in unet and "absent" not in unet


def test_gzipped_and_extracted_checkpoints(tmp_path, tiny_nemo, tiny_modules):
    zipped = tmp_path / "old.nemo"
    zipped.write_bytes(gzip.compress(tiny_nemo.read_bytes(), compresslevel=1))
    assert_same_modules(built_networks(open_nemo(zipped)), tiny_modules)
    folder = tmp_path / "extracted"
    with tarfile.open(tiny_nemo) as tar:
        tar.extractall(folder, filter="data")
    assert_same_modules(built_networks(open_nemo(folder)), tiny_modules)


def test_known_variants_of_keys_and_config(repack, tiny_modules):
    def wrap(config, state):
        inner = dict(config)
        config.clear()
        config["model"] = inner
        for key in list(state):
            new = key.replace("model.model.diffusion_model.", "model.model.diffusion_model._orig_mod.")
            state[new.replace("model.", "model.module.", 1)] = state.pop(key)
        state["model.module.conditioner.embedders.0.transformer.text_model.embeddings.position_ids"] = torch.arange(16)[
            None
        ]
        del state["model.module.denoiser.sigmas"]

    assert_same_modules(built_networks(open_nemo(repack(wrap))), tiny_modules)


def refusal(path) -> str:
    with pytest.raises(ArtifactError) as caught:
        open_nemo(path)
    return str(caught.value)


def test_missing_unknown_and_misshapen_keys_are_counted_and_named(repack):
    unet = nemo_keys.PREFIX["unet"]

    def change(config, state):
        for key in [key for key in state if ".transformer_blocks.1." in key]:
            del state[key]
        state["model.stranger\n"] = torch.ones(1)
        state[unet + "input_blocks.0.0.weight"] = torch.ones(32, 4, 1, 1)

    message = refusal(repack(change))
    # the second block of 4 transformers (1 down, 1 middle, 2 up) has 20 weights
    assert "80 missing: model.model.diffusion_model." in message and "and 70 more" in message
    assert r"1 unknown: model.stranger\n" in message
    assert (
        "1 misshapen: model.model.diffusion_model.input_blocks.0.0.weight [32, 4, 1, 1] instead of [32, 4, 3, 3]"
        in message
    )


def test_a_text_encoder_that_is_missing(repack):
    def change(config, state):
        for key in [key for key in state if key.startswith(nemo_keys.PREFIX["text_encoder_2"])]:
            del state[key]

    assert "text encoders" in refusal(repack(change))


def test_the_same_weight_wrapped_and_plain(repack):
    key = nemo_keys.PREFIX["unet"] + "out.0.weight"
    changed = repack(lambda config, state: state.update({key.replace("model.", "model.module.", 1): state[key]}))
    assert "plain and wrapped" in refusal(changed)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn])
def test_dtypes_that_are_not_weights(repack, dtype):
    key = nemo_keys.PREFIX["vae"] + "quant_conv.weight"
    message = refusal(repack(lambda config, state: state.update({key: state[key].to(dtype)})))
    assert key in message and str(dtype) in message


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("component, key", [("unet", "out.1.bias"), ("text_encoder_2", "text_projection")])
def test_values_that_are_not_finite_are_named(repack, component, key, value):
    def change(config, state):
        state[nemo_keys.PREFIX[component] + key].view(-1)[1] = value

    checkpoint = open_nemo(repack(change))
    with pytest.raises(ArtifactError, match=f"{key}' of the {component} holds 1 NaN or infinite"):
        check_finite(checkpoint.components[component])
    check_finite(checkpoint.components["vae"])


@pytest.mark.parametrize(
    "path, value",
    [
        (("unet_config", "num_res_blocks"), 10**9),
        (("unet_config", "transformer_depth"), [1, 10**9]),
        (("unet_config", "channel_mult"), [1] * 1000),
        (("unet_config", "model_channels"), "wide"),
        (("unet_config", "model_channels"), 10**30),
        (("unet_config", "num_head_channels"), 0),
        (("first_stage_config", "ddconfig"), None),
        (("conditioner_config", "emb_models"), []),
    ],
)
def test_configs_that_describe_no_sdxl(repack, path, value):
    def change(config, state):
        config[path[0]][path[1]] = value

    assert "does not describe an SDXL" in refusal(repack(change))


@pytest.mark.parametrize(
    "config, message",
    [
        (b"- 1\n- 2\n", "holds a list"),
        (b"", "holds a NoneType"),
        (b"a: [", "not plain YAML"),
        (b"\xff\xfe\xff", "not plain YAML"),
        (b"a: !!python/object/apply:os.mkdir [canary]", "not plain YAML"),
        (b"[" * 100_000, "not plain YAML"),
        (b"#" * (2**20 + 1), "expected at most 1048576"),
    ],
)
def test_configs_that_are_not_plain_yaml(tmp_path, monkeypatch, tiny_nemo, config, message):
    monkeypatch.chdir(tmp_path)
    with tarfile.open(tiny_nemo) as tar:
        tar.extractall(tmp_path / "extracted", filter="data")
    (tmp_path / "extracted/model_config.yaml").write_bytes(config)
    assert message in refusal(tmp_path / "extracted")
    assert not (tmp_path / "canary").exists()


def test_a_model_parallel_checkpoint(tmp_path):
    (tmp_path / "model_config.yaml").write_text("a: 1")
    assert "holds no model_weights.ckpt but model_config.yaml" in refusal(tmp_path)


def test_every_cut_is_refused(tmp_path, tiny_nemo):
    whole = tiny_nemo.read_bytes()
    path = tmp_path / "cut.nemo"
    for length in (0, 100, 512, 3000, len(whole) // 2, len(whole) - 1024, len(whole) - 512):
        path.write_bytes(whole[:length])
        refusal(path)


def test_a_cut_after_opening_is_an_error_not_a_crash(tmp_path, tiny_nemo):
    path = tmp_path / "copy.nemo"
    path.write_bytes(tiny_nemo.read_bytes())
    checkpoint = open_nemo(path)
    with path.open("r+b") as file:
        file.truncate(10_000)
    with pytest.raises(ArtifactError, match="became shorter"):
        built_networks(checkpoint)


def test_a_failed_write_leaves_no_file(tmp_path, tiny_config, tiny_modules):
    with pytest.raises(KeyError):
        write_nemo(tmp_path / "a.nemo", {}, tiny_modules, torch.float32)
    assert list(tmp_path.iterdir()) == []
