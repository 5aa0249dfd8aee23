"""Small networks with random weights in the layouts of OpenCLIP and ImageReward, written from the papers' formulas.

They are made of torch's own layers under the authors' names, so that their state dicts are files of the real
architectures, and share nothing with transformers' classes, which the scores are computed with.
"""

from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz", *(f"##{x}" for x in "abcdefghij")]
CLIP_SIZES = {
    "vision_config": {
        "hidden_size": 24, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3,
        "patch_size": 56, "image_size": 224, "hidden_act": "gelu",
    },
    "text_config": {
        "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
        "max_position_embeddings": 77, "hidden_act": "gelu", "vocab_size": 49408, "eos_token_id": 49407,
    },
}  # fmt: skip
CLIP_WIDTH = 12
VISION = {
    "hidden_size": 24, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3,
    "image_size": 224, "patch_size": 56, "hidden_act": "gelu", "layer_norm_eps": 1e-6,
}  # fmt: skip
TEXT = {
    "vocab_size": len(VOCABULARY) + 2, "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 40, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
}  # fmt: skip


def drawn(network: nn.Module, seed: int = 0) -> nn.Module:
    """With weights that no two scores share; as large as those of trained networks, so that rounding is small."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        ones = parameter.ndim == 1 and name.endswith("weight")
        spread = 0.1 if parameter.ndim < 2 else parameter[0].numel() ** -0.5
        parameter.data = torch.randn(parameter.shape, generator=generator) * spread + float(ones)
    return network.eval()


class OpenClipBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        layers = ("c_fc", nn.Linear(width, 4 * width)), ("gelu", nn.GELU()), ("c_proj", nn.Linear(4 * width, width))
        self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        normed = self.ln_1(x)
        x = x + self.attn(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


def blocks(config: dict) -> nn.Module:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    holder = nn.Module()
    holder.resblocks = nn.ModuleList(OpenClipBlock(width, heads) for _ in range(config["num_hidden_layers"]))
    return holder


class OpenClip(nn.Module):
    """OpenCLIP's CLIP: features of pixels [N, 3, 224, 224] and of tokens [N, 77]."""

    def __init__(self, vision: dict, text: dict, features: int):
        super().__init__()
        width, self.visual = vision["hidden_size"], nn.Module()
        self.visual.conv1 = nn.Conv2d(3, width, vision["patch_size"], vision["patch_size"], bias=False)
        self.visual.class_embedding = nn.Parameter(torch.empty(width))
        patches = (vision["image_size"] // vision["patch_size"]) ** 2
        self.visual.positional_embedding = nn.Parameter(torch.empty(patches + 1, width))
        self.visual.ln_pre, self.visual.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.visual.transformer, self.visual.proj = blocks(vision), nn.Parameter(torch.empty(width, features))
        width = text["hidden_size"]
        self.token_embedding = nn.Embedding(text["vocab_size"], width)
        self.positional_embedding = nn.Parameter(torch.empty(text["max_position_embeddings"], width))
        self.transformer, self.ln_final = blocks(text), nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.empty(width, features))
        self.logit_scale = nn.Parameter(torch.empty(()))

    def image(self, pixels: Tensor) -> Tensor:
        patches = self.visual.conv1(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.visual.class_embedding.expand(len(pixels), 1, -1), patches], 1)
        x = self.visual.ln_pre(x + self.visual.positional_embedding)
        for block in self.visual.transformer.resblocks:
            x = block(x)
        return self.visual.ln_post(x[:, 0]) @ self.visual.proj

    def text(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.positional_embedding
        mask = torch.full((tokens.shape[1],) * 2, -torch.inf).triu(1)
        for block in self.transformer.resblocks:
            x = block(x, mask)
        return self.ln_final(x)[torch.arange(len(tokens)), tokens.argmax(-1)] @ self.text_projection


def small_hps(path: Path, **changed: int) -> OpenClip:
    """Writes a file as HPSv2's, in half precision, and returns the network; ``changed`` are sizes of its vision."""
    network = drawn(OpenClip(CLIP_SIZES["vision_config"] | changed, CLIP_SIZES["text_config"], CLIP_WIDTH)).half()
    torch.save({"epoch": 3, "state_dict": network.state_dict()}, path)
    return network.float()


def linear(state: dict, name: str, x: Tensor) -> Tensor:
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def norm(state: dict, name: str, x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return (
        centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * state[f"{name}.weight"]
        + state[f"{name}.bias"]
    )


def attended(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None) -> Tensor:
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


def image_reward_state(seed: int = 0) -> dict[str, Tensor]:
    """A state dict as ImageReward's, with what the authors' file holds and nobody reads."""
    width, text = VISION["hidden_size"], TEXT["hidden_size"]
    vision, embeddings = "blip.visual_encoder.", "blip.text_encoder.embeddings."
    linears = {"blip.vision_proj": (256, width), "blip.text_proj": (256, text)}
    widths = {0: (1024, text), 2: (128, 1024), 4: (64, 128), 6: (16, 64), 7: (1, 16)}
    linears |= {f"mlp.layers.{i}": shape for i, shape in widths.items()}
    norms = {f"{vision}norm": width, f"{embeddings}LayerNorm": text}
    for i in range(VISION["num_hidden_layers"]):
        block = f"{vision}blocks.{i}."
        linears |= {f"{block}attn.qkv": (3 * width, width), f"{block}attn.proj": (width, width)}
        linears |= {f"{block}mlp.fc1": (4 * width, width), f"{block}mlp.fc2": (width, 4 * width)}
        norms |= {f"{block}norm1": width, f"{block}norm2": width}
    for i in range(TEXT["num_hidden_layers"]):
        layer = f"blip.text_encoder.encoder.layer.{i}."
        linears |= {f"{layer}intermediate.dense": (4 * text, text), f"{layer}output.dense": (text, 4 * text)}
        norms |= {f"{layer}output.LayerNorm": text}
        for name, read in (("attention", text), ("crossattention", width)):
            linears |= {f"{layer}{name}.self.{each}": (text, read) for each in ("key", "value")}
            linears |= {f"{layer}{name}.self.query": (text, text), f"{layer}{name}.output.dense": (text, text)}
            norms |= {f"{layer}{name}.output.LayerNorm": text}
    found = {
        f"{vision}cls_token": (1, 1, width), f"{vision}pos_embed": (1, 17, width),
        f"{vision}patch_embed.proj.weight": (width, 3, 56, 56), f"{vision}patch_embed.proj.bias": (width,),
        f"{embeddings}word_embeddings.weight": (TEXT["vocab_size"], text),
        f"{embeddings}position_embeddings.weight": (TEXT["max_position_embeddings"], text),
    }  # fmt: skip
    for name, shape in (linears | {name: (size,) for name, size in norms.items()}).items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    holder = nn.ParameterDict({name.replace(".", "/"): torch.empty(shape) for name, shape in found.items()})
    drawn(holder, seed)
    state = {name.replace("/", "."): parameter.data for name, parameter in holder.items()}
    return state | {f"{embeddings}position_ids": torch.arange(TEXT["max_position_embeddings"])[None]}


def image_reward_by_formula(state: dict[str, Tensor], pixels: Tensor, tokens: Tensor) -> Tensor:
    """The rewards of pixels [N, 3, 224, 224] and tokens [N, 35], padded with 0."""
    vision = {name.removeprefix("blip.visual_encoder."): each for name, each in state.items()}
    weight, bias = vision["patch_embed.proj.weight"], vision["patch_embed.proj.bias"]
    patches = nn.functional.conv2d(pixels, weight, bias, stride=weight.shape[-1]).flatten(2).transpose(1, 2)
    x = torch.cat([vision["cls_token"].expand(len(pixels), 1, -1), patches], 1) + vision["pos_embed"]
    for i in range(VISION["num_hidden_layers"]):
        q, k, v = linear(vision, f"blocks.{i}.attn.qkv", norm(vision, f"blocks.{i}.norm1", x, 1e-6)).chunk(3, -1)
        x = x + linear(vision, f"blocks.{i}.attn.proj", attended(q, k, v, VISION["num_attention_heads"]))
        inner = linear(vision, f"blocks.{i}.mlp.fc1", norm(vision, f"blocks.{i}.norm2", x, 1e-6))
        x = x + linear(vision, f"blocks.{i}.mlp.fc2", nn.functional.gelu(inner))
    seen = norm(vision, "norm", x, 1e-6)

    text = {name.removeprefix("blip.text_encoder."): each for name, each in state.items()}
    x = text["embeddings.word_embeddings.weight"][tokens]
    x = norm(text, "embeddings.LayerNorm", x + text["embeddings.position_embeddings.weight"][: x.shape[1]], 1e-12)
    kept = (tokens != 0)[:, None, None]
    for i in range(TEXT["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        for name, source, mask in (("attention", None, kept), ("crossattention", seen, None)):
            read = x if source is None else source
            q, k, v = (linear(text, f"{layer}{name}.self.{each}", here)
                       for each, here in (("query", x), ("key", read), ("value", read)))  # fmt: skip
            out = linear(text, f"{layer}{name}.output.dense", attended(q, k, v, TEXT["num_attention_heads"], mask))
            x = norm(text, f"{layer}{name}.output.LayerNorm", x + out, 1e-12)
        out = linear(text, f"{layer}output.dense", nn.functional.gelu(linear(text, f"{layer}intermediate.dense", x)))
        x = norm(text, f"{layer}output.LayerNorm", x + out, 1e-12)
    reward = x[:, 0]
    for i in (0, 2, 4, 6, 7):
        reward = linear(state, f"mlp.layers.{i}", reward)
    return (reward[:, 0] - 0.16717362830052426) / 1.0333394966054072


def small_image_reward(folder: Path) -> dict[str, Tensor]:
    """Writes a folder as ImageReward's and returns its state dict."""
    folder.mkdir(parents=True, exist_ok=True)
    state = image_reward_state()
    torch.save(state, folder / "ImageReward.pt")
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return state


def small_dino(folder: Path) -> None:
    """Writes a DINOv2 of two layers with its image processor."""
    from transformers import Dinov2Config, Dinov2Model
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

    config = Dinov2Config(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, image_size=56, patch_size=14)
    drawn(Dinov2Model(config)).save_pretrained(folder)
    means, deviations = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    BitImageProcessorPil(
        size={"shortest_edge": 64}, crop_size={"height": 56, "width": 56}, image_mean=means, image_std=deviations
    ).save_pretrained(folder)
