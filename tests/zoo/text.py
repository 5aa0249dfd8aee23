"""Tiny text encoders, each with a real tokenizer of the class that the published pipelines have, made offline.

A tokenizer that knows nothing but letters would be simpler, but the pipelines cut their prompts' templates off at a
fixed number of tokens: a template has to be about as long as with the true vocabulary. So the vocabularies are learnt
from `CORPUS`, whose words become single tokens. Nothing is read from a network or a cache.

Each function returns an encoder and a tokenizer. `width` is the width of the embeddings that the encoder gives.
Encoders have two layers (more where a pipeline reads more of them) and two heads or more.
"""

import atexit
import functools
import io
import json
import shutil
import string
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from sd_quant.models.clip_tokenizer import CONTEXT_LENGTH, clip_tokenizer

CORPUS = """
a photo of a red cat on a green table. a dog runs over the blue bridge in the rain, oil painting, highly detailed.
an astronaut rides a white horse on the moon. two small boats at sunset near the old harbour, watercolour, soft light.
a bowl of fruit and a glass of water on a wooden desk. the city at night with neon signs, low quality, blurry, bad.
you are an assistant. Describe the image by detailing the color, shape, size, texture, quantity, text, spatial
relationships of the objects and background: You are an assistant designed to generate superior images with the
superior degree of image text alignment based on textual prompts or user prompts. the video, its main content and
theme, its actions, events, behaviors, movements and changes, environment, light, style and camera angles.
system user assistant prompt think image video frame scene Generate Prompt Start Answer the question given.
"""
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
PLAIN_CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '[' + message['role'] + ']' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for item in message['content'] %}{{ item['text'] }}{% endfor %}{% endif %}{% endfor %}"
)
QWEN_MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
                "<|image_pad|>", "<|video_pad|>")  # fmt: skip
MISTRAL_MARKERS = ("<unk>", "<s>", "</s>", "<pad>", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
LLAMA_MARKERS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
GLM_MARKERS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "[gMASK]", "<sop>")
VOCABULARY = 896  # entries of every encoder's embedding; more than any tokenizer here has, as published ones
HEADS, HEAD_WIDTH = 2, 16
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": HEADS}
LENGTH = 2048  # tokens that a decoder's tokenizer takes
Pair = tuple[Any, Any]  # an encoder and its tokenizer


@functools.cache
def byte_pairs(size: int = 800) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns ``size`` entries and their merges of a byte-level vocabulary, as GPT-2, Llama 3, Qwen and GLM have."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


@functools.cache
def spaced_pairs(size: int = 800) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns entries and merges of a vocabulary that marks spaces by "▁" and falls back to bytes, as Gemma's."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    alphabet = ["▁", *string.printable[:95].replace(" ", ""), "\n"]
    trainer = trainers.BpeTrainer(vocab_size=size - 256, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].get)
    return [*fallback, *words], [tuple(pair) for pair in model["merges"]]


def numbered(*words: str) -> dict[str, int]:
    return {word: index for index, word in enumerate(dict.fromkeys(words))}


def pieces() -> list[tuple[str, float]]:
    """Returns a unigram vocabulary as T5's: printable characters, and the corpus's words, which are likelier."""
    characters = [*string.ascii_letters, *string.digits, *string.punctuation]
    words = sorted({f"▁{word.strip(string.punctuation)}" for word in CORPUS.split()} - {"▁"})
    scored = [("▁", -4.0), *((character, -6.0) for character in characters), *((word, -3.0) for word in words)]
    return [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *scored]


def t5_tokenizer(length: int = 512) -> Any:
    """Returns a ``T5Tokenizer`` whose padded length is ``length`` where a pipeline asks for the longest."""
    return transformers.T5Tokenizer(pieces(), extra_ids=0, model_max_length=length)


def bert_tokenizer(length: int = 77) -> Any:
    characters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    words = sorted({word.strip(string.punctuation).lower() for word in CORPUS.split()})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = numbered(*special, *characters, *(f"##{character}" for character in characters), *filter(None, words))
    return transformers.BertTokenizer(vocab, model_max_length=length)


def qwen_tokenizer() -> Any:
    """Returns a ``Qwen2Tokenizer``, which Qwen2, 2.5 and 3 have, with the template of a chat."""
    vocab, merges = byte_pairs()
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=numbered(*vocab, *QWEN_MARKERS), merges=list(merges), model_max_length=LENGTH
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(QWEN_MARKERS)})
    tokenizer.chat_template = CHATML
    return tokenizer


def fast_tokenizer(
    markers: tuple[str, ...], prefix: tuple[str, ...], first: tuple[str, ...] = (), **special: Any
) -> Any:
    """Returns a byte-level tokenizer without a class of its own, which puts ``prefix`` before each text.

    ``first`` are the tokens with the lowest numbers, ``markers`` those with the highest.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocab, merges = byte_pairs()
    words = numbered(*first, *vocab, *markers)
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*prefix, "$A"], special_tokens=[(marker, words[marker]) for marker in prefix]
    )
    result = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LENGTH, **special)
    result.add_special_tokens({"additional_special_tokens": [*first, *markers]})
    result.chat_template = PLAIN_CHAT
    return result


mistral_tokenizer = functools.partial(
    fast_tokenizer, MISTRAL_MARKERS, ("<s>",), bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
)
glm_tokenizer = functools.partial(  # as GLM-4's, which pads on the left
    fast_tokenizer, GLM_MARKERS, ("[gMASK]", "<sop>"), eos_token="<|endoftext|>", pad_token="<|endoftext|>",
    padding_side="left",
)  # fmt: skip
llama_tokenizer = functools.partial(
    fast_tokenizer, LLAMA_MARKERS, LLAMA_MARKERS[:1], bos_token=LLAMA_MARKERS[0], eos_token=LLAMA_MARKERS[1],
    pad_token=LLAMA_MARKERS[1],
)  # fmt: skip


def sentence_llama_tokenizer() -> Any:
    """Returns a ``LlamaTokenizer`` with marked spaces, as Llama 1 and 2 and Phi-3."""
    words, merges = spaced_pairs()
    vocab = numbered("<unk>", "<s>", "</s>", *words)
    return transformers.LlamaTokenizer(vocab, list(merges), model_max_length=LENGTH, pad_token="</s>")


def gemma_tokenizer() -> Any:
    words, merges = spaced_pairs()
    vocab = numbered("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *words)
    tokenizer = transformers.GemmaTokenizer(vocab, list(merges), model_max_length=LENGTH, add_bos_token=True)
    tokenizer.chat_template = PLAIN_CHAT
    return tokenizer


def clip(
    width: int = 32, projected: bool = False, pad_token: str = "<|endoftext|>", vocabulary: int = VOCABULARY,
    **sizes: Any,
) -> Pair:  # fmt: skip
    """Returns a ``CLIPTextModel``, or ``CLIPTextModelWithProjection`` whose projection has the same width."""
    entries = dict(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, projection_dim=width,
        num_hidden_layers=2, num_attention_heads=HEADS, max_position_embeddings=CONTEXT_LENGTH,
        bos_token_id=vocabulary - 2, eos_token_id=vocabulary - 1,
        pad_token_id=0 if pad_token == "!" else vocabulary - 1,
    )  # fmt: skip
    kind = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    return kind(transformers.CLIPTextConfig(**entries | sizes)), clip_tokenizer(vocabulary, pad_token)


def clip_vision(width: int = 32, size: int = 32) -> Pair:
    config = transformers.CLIPVisionConfig(
        hidden_size=width, intermediate_size=2 * width, projection_dim=width, num_hidden_layers=2,
        num_attention_heads=HEADS, image_size=size, patch_size=size // 4,
    )  # fmt: skip
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    return transformers.CLIPVisionModelWithProjection(config), processor


def t5_sizes(width: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "d_model": width, "d_kv": HEAD_WIDTH, "d_ff": 2 * width, "num_layers": 2,
        "num_heads": HEADS, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    }  # fmt: skip


def t5(width: int = 32, length: int = 512) -> Pair:
    return transformers.T5EncoderModel(transformers.T5Config(**t5_sizes(width))), t5_tokenizer(length)


def umt5() -> Pair:
    return transformers.UMT5EncoderModel(transformers.UMT5Config(**t5_sizes(32))), t5_tokenizer()


def byte_t5() -> Pair:
    """Returns a ``T5EncoderModel`` that reads bytes and markers, 384 tokens."""
    return t5()[0], transformers.ByT5Tokenizer(model_max_length=128)


def bert(width: int = 32, length: int = 77) -> Pair:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=HEADS, max_position_embeddings=max(length, 77),
    )  # fmt: skip
    return transformers.BertModel(config), bert_tokenizer(length)


def decoder_sizes(width: int, layers: int = 2, **markers: int | None) -> dict[str, Any]:
    """Returns sizes that the configurations of Llama and its descendants share; a key serves two heads' queries."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers,
        "num_attention_heads": 2 * HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_WIDTH,
        "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": False,
    } | markers  # fmt: skip


def decoder(kind: str, tokenizer: Callable[[], Any], causal: bool = False, **own: Any) -> Callable[..., Pair]:
    """Returns what makes transformers' model of this ``kind``, or its ``ForCausalLM``, with further sizes."""

    def made(layers: int = 2, causal: bool = causal) -> Pair:
        config = getattr(transformers, f"{kind}Config")(**decoder_sizes(32, layers), **own)
        return getattr(transformers, f"{kind}{'ForCausalLM' if causal else 'Model'}")(config), tokenizer()

    return made


llama, qwen3, glm = decoder("Llama", llama_tokenizer), decoder("Qwen3", qwen_tokenizer), decoder("Glm", glm_tokenizer)
gemma, gemma2 = (
    decoder("Gemma", gemma_tokenizer), decoder("Gemma2", gemma_tokenizer, query_pre_attn_scalar=HEAD_WIDTH)
)  # fmt: skip
smollm3 = decoder("SmolLM3", llama_tokenizer, causal=True)


def t5gemma() -> Pair:
    """Returns a ``T5GemmaEncoder``.

    It runs by the configuration of an encoder, and diffusers opens it by that of an encoder and a decoder, so its
    configuration is both.
    """
    from transformers.models.t5gemma.configuration_t5gemma import T5GemmaConfig, T5GemmaModuleConfig
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    sizes = decoder_sizes(32) | {"query_pre_attn_scalar": HEAD_WIDTH, "dropout_rate": 0.0}
    half = T5GemmaModuleConfig(**sizes)
    encoder = T5GemmaEncoder(half)
    attention = encoder.config._attn_implementation
    encoder.config = T5GemmaConfig(encoder=half, decoder=T5GemmaModuleConfig(**sizes), vocab_size=VOCABULARY)
    encoder.config._attn_implementation = attention
    for name, value in half.to_dict().items():
        if not hasattr(encoder.config, name):
            setattr(encoder.config, name, value)
    return encoder, gemma_tokenizer()


def chatglm() -> Pair:
    """Returns diffusers' ``ChatGLMModel`` and ``ChatGLMTokenizer``, whose vocabulary is SentencePiece's."""
    from diffusers.pipelines.kolors import ChatGLMModel, ChatGLMTokenizer
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig

    config = ChatGLMConfig(
        num_layers=2, padded_vocab_size=VOCABULARY, hidden_size=32, ffn_hidden_size=64,
        kv_channels=HEAD_WIDTH, num_attention_heads=2 * HEADS, multi_query_attention=True, multi_query_group_num=HEADS,
        add_qkv_bias=True, seq_length=2048, original_rope=True,
    )  # fmt: skip
    encoder = ChatGLMModel(config)
    for name, parameter in encoder.named_parameters():  # the class leaves their memory as it finds it
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        else:
            nn.init.constant_(parameter, float(name.endswith("weight")))
    return encoder, ChatGLMTokenizer(str(sentence_pieces()))


@functools.cache
def sentence_pieces() -> Path:
    """Returns the file of a SentencePiece vocabulary with 800 entries, which falls back to bytes.

    A tokenizer saves itself by copying its file, so that stays until the process ends.
    """
    import sentencepiece

    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.strip().splitlines()), model_writer=written, vocab_size=800, model_type="bpe",
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2, num_threads=1,
    )  # fmt: skip
    path = Path(folder, "tokenizer.model")
    path.write_bytes(written.getvalue())
    return path


def glm_image(codes: int = 64) -> Pair:
    """Returns a ``GlmImageForConditionalGeneration`` that writes ``codes`` kinds of tokens, and its processor.

    The published one ends an image by a token that random weights would draw too early; this one has no end.
    """
    names = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    tokens = tuple(f"<|dit_token_{index}|>" for index in range(codes))
    start, end = codes - 2, codes - 1
    tokenizer = fast_tokenizer(
        (*names.values(), "<|endoftext|>"), (), first=tokens, extra_special_tokens=names, bos_token=tokens[start],
        eos_token=tokens[end], pad_token="<|endoftext|>", padding_side="left",
    )  # fmt: skip
    tokenizer.chat_template = PLAIN_CHAT.removeprefix("{{ bos_token }}")
    sizes = decoder_sizes(32) | {"num_attention_heads": HEADS, "num_key_value_heads": 1}
    del sizes["head_dim"]  # this class divides the width by the heads
    markers = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": start, "eos_token_id": None}
    config = transformers.GlmImageConfig(
        text_config=sizes | markers | {"vision_vocab_size": codes, "rope_parameters": rotation(4, 2, 2)},
        vision_config=VISION | {"image_size": 64},
        vq_config={"embed_dim": 16, "num_embeddings": codes - 2, "latent_channels": 32},
        image_token_id=tokenizer.convert_tokens_to_ids(names["image_token"]),
        image_start_token_id=start, image_end_token_id=end,
    )  # fmt: skip
    processor = transformers.GlmImageProcessor(
        transformers.GlmImageImageProcessor(), tokenizer, chat_template=tokenizer.chat_template
    )
    return transformers.GlmImageForConditionalGeneration(config), processor


def qwen_markers(tokenizer: Any) -> dict[str, int]:
    """Returns the tokens that a configuration of Qwen names where it reads images."""
    tokens = {
        "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
        "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
    }  # fmt: skip
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


def rotation(*sections: int) -> dict[str, Any]:
    """Returns how many pairs of a head turn by time, height and width: half of `HEAD_WIDTH` in all."""
    return {"rope_type": "default", "mrope_section": list(sections), "rope_theta": 10000.0}


def qwen2_5_vl(layers: int = 2, text_only: bool = False) -> Pair:
    """Returns a ``Qwen2_5_VLForConditionalGeneration``, or its ``Qwen2_5_VLTextModel``."""
    tokenizer = qwen_tokenizer()
    sizes = decoder_sizes(32, layers) | {"num_attention_heads": HEADS, "num_key_value_heads": 1}
    del sizes["head_dim"]  # this class divides the width by the heads
    config = transformers.Qwen2_5_VLConfig(
        text_config=sizes | {"rope_parameters": rotation(4, 2, 2)},
        vision_config=VISION | {"out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 56},
        tie_word_embeddings=False, **qwen_markers(tokenizer),
    )  # fmt: skip
    if text_only:
        return transformers.Qwen2_5_VLTextModel(config.text_config), tokenizer
    return transformers.Qwen2_5_VLForConditionalGeneration(config), tokenizer


def qwen3_vl(width: int = 32, layers: int = 2, generating: bool = True) -> Pair:
    """Returns a ``Qwen3VLForConditionalGeneration``, or ``Qwen3VLModel``."""
    tokenizer = qwen_tokenizer()
    vision = {"out_hidden_size": width, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLConfig(
        text_config=decoder_sizes(width, layers) | {"rope_parameters": rotation(4, 2, 2)},
        vision_config=VISION | vision, tie_word_embeddings=False, **qwen_markers(tokenizer),
    )  # fmt: skip
    kind = transformers.Qwen3VLForConditionalGeneration if generating else transformers.Qwen3VLModel
    return kind(config), tokenizer


def mistral3(layers: int = 2, generating: bool = True) -> Pair:
    """Returns a ``Mistral3ForConditionalGeneration``, or ``Mistral3Model``."""
    tokenizer = mistral_tokenizer()
    vision = {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "head_dim": HEAD_WIDTH, "image_size": 56, "patch_size": 14,
    }  # fmt: skip
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral"} | decoder_sizes(32, layers),
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
    )
    kind = transformers.Mistral3ForConditionalGeneration if generating else transformers.Mistral3Model
    return kind(config), tokenizer
