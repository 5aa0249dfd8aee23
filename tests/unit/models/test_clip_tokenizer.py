import pytest

from sd_quant.models.clip_tokenizer import CLIP_VOCAB_SIZE, CONTEXT_LENGTH, clip_tokenizer

pytestmark = pytest.mark.commit

START, END = 49406, 49407


@pytest.fixture(scope="module")
def clip():
    return clip_tokenizer()


@pytest.mark.parametrize(
    "text, ids",
    [("a photo of a cat", [320, 1125, 539, 320, 2368]), ("A  Photo of a CAT ", [320, 1125, 539, 320, 2368]), ("", [])],
)
def test_the_ids_that_openai_published(clip, text, ids):
    assert clip(text)["input_ids"] == [START, *ids, END]


@pytest.mark.parametrize("pad_token, id", [("<|endoftext|>", END), ("!", 0)])  # OpenAI's and OpenCLIP's
def test_texts_of_any_length_become_a_context(pad_token, id):
    fill = {"padding": "max_length", "truncation": True, "max_length": CONTEXT_LENGTH}
    short, long = clip_tokenizer(pad_token=pad_token)(["a cat", "cat " * 200], **fill)["input_ids"]
    assert short == [START, 320, 2368, END, *[id] * (CONTEXT_LENGTH - 4)]
    assert len(long) == CONTEXT_LENGTH and long[0] == START and long[-1] == END


@pytest.mark.parametrize("vocab_size", [514, 1000])
def test_a_smaller_vocabulary_knows_fewer_merges_but_every_text(vocab_size):
    """Without merges every byte is a symbol."""
    tokenizer = clip_tokenizer(vocab_size)
    ids = tokenizer("a photo of a cat, ein Kätzchen 🐈")["input_ids"]
    assert len(tokenizer) == vocab_size and max(ids) == ids[-1] == vocab_size - 1 and ids[0] == vocab_size - 2
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == "aphotoofacat,einkätzchen🐈"
    assert (len(tokenizer("cat")["input_ids"]) == 5) == (vocab_size == 514)


@pytest.mark.parametrize("vocab_size", [0, 513, CLIP_VOCAB_SIZE + 1])
def test_other_sizes_are_refused(vocab_size):
    with pytest.raises(ValueError, match=f"not {vocab_size}"):
        clip_tokenizer(vocab_size)
