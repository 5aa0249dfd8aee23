"""CLIP's byte-pair tokenizer, built from its list of merges without a model hub.

A NeMo archive holds no tokenizer, because NeMo fetches it by name. CLIP's merges are shipped here instead
(``clip_bpe_merges.txt.gz``, from OpenAI's CLIP, MIT licence). The vocabulary follows from its size: 256 byte symbols,
the same 256 at the end of a word, one symbol for each merge in order, and the two markers. With 49408 entries it is
CLIP's own; a smaller checkpoint has fewer merges.
"""

import gzip
from importlib import resources
from typing import Any

CLIP_VOCAB_SIZE = 49408
CONTEXT_LENGTH = 77


def clip_tokenizer(vocab_size: int = CLIP_VOCAB_SIZE, pad_token: str = "<|endoftext|>"):
    """Return a ``transformers.CLIPTokenizer`` with ``vocab_size`` entries.

    CLIP-L pads with the end marker, OpenCLIP with ``"!"``, which has id 0.
    Raises ValueError when ``vocab_size`` is outside 514..49408.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    if not 514 <= vocab_size <= CLIP_VOCAB_SIZE:
        raise ValueError(f"a CLIP vocabulary has 514 to {CLIP_VOCAB_SIZE} entries, not {vocab_size}")
    packed = resources.files(__package__).joinpath("clip_bpe_merges.txt.gz").read_bytes()
    lines = gzip.decompress(packed).decode("utf-8").split("\n")[1 : vocab_size - 514 + 1]
    merges: Any = [tuple(line.split()) for line in lines]  # the signature asks for lines, the code for pairs
    symbols = sorted(ByteLevel.alphabet())  # the 256 printable characters that represent bytes, in CLIP's order
    words = [*symbols, *(symbol + "</w>" for symbol in symbols), *("".join(pair) for pair in merges)]
    vocab = {word: index for index, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocab, merges=merges, pad_token=pad_token, model_max_length=CONTEXT_LENGTH)
