import numpy as np
import pytest
from PIL import Image, ImageFont

from sd_quant.errors import ArtifactError
from sd_quant.report import images
from sd_quant.report.images import _wrap, comparison_grid, save_animations, save_images

pytestmark = pytest.mark.commit


def gradient(count: int, size: int) -> np.ndarray:
    ramp = np.linspace(0, 255, size).astype(np.uint8)
    return np.broadcast_to(ramp[None, :, None, None], (count, size, size, 3)).copy()


def test_a_videos_frames_are_played_one_after_the_other(tmp_path):
    frames = [np.full((16, 24, 3), 40 * number, np.uint8) for number in range(1, 5)]
    strips = np.concatenate(frames, axis=1)[None]
    [path] = save_animations(strips, 24, tmp_path, ["0000"])
    with Image.open(path) as video:
        assert video.n_frames == 4 and video.size == (24, 16)
        for number, frame in enumerate(frames):
            video.seek(number)
            assert (np.asarray(video.convert("RGB")) == frame).all()


def test_hostile_captions_are_only_drawn(tmp_path):
    captions = ["\x1b[2J\x00\n\u202e=cmd|'!A0", "\ud800 " + "x" * 100_000, ""]
    path = comparison_grid(gradient(3, 64), gradient(3, 64), tmp_path / "grid.png", captions)
    assert [file.name for file in tmp_path.iterdir()] == ["grid.png"]
    with Image.open(path) as image:
        assert image.info == {}
    font = ImageFont.load_default(size=12)
    for caption in [*captions, "a very long caption of many words that does not fit", "a " * 100]:
        lines = _wrap(caption, font, 60)
        assert len(lines) <= 2
        assert all(font.getlength(line) <= 60 and line.isprintable() for line in lines)
    assert _wrap("a long caption that does not fit", font, 60)[-1].endswith("...")
    assert _wrap("it fits", font, 60) == ["it fits"]


def test_thousands_of_pairs_give_a_grid_that_still_opens(tmp_path):
    path = comparison_grid(gradient(1000, 16), gradient(1000, 16), tmp_path / "grid.png", [""] * 1000)
    with Image.open(path) as image:
        width, height = image.size
    assert 8 * 2 * 16 < width < 1000 and 8 * 2 * 32 < height < 1000


def test_images_of_several_sizes_are_saved_and_drawn_as_they_are_and_of_another_type_refused(tmp_path, monkeypatch):
    with pytest.raises(ArtifactError, match="float64"):
        save_images(np.zeros((1, 8, 8, 3)), tmp_path / "images", ["a"])
    assert not (tmp_path / "images").exists()
    monkeypatch.setattr(images, "SCALE", 1)
    black = [np.zeros((height, width, 3), np.uint8) for height, width in ((64, 64), (32, 64), (64, 32))]
    for image, path in zip(black, save_images(black, tmp_path / "images", ["a", "b", "c"]), strict=True):
        with Image.open(path) as saved:
            assert np.array_equal(np.asarray(saved), image)
    white = [255 - image for image in black]
    with Image.open(comparison_grid(white, black, tmp_path / "grid.png", [""] * 3)) as image:
        grid = np.asarray(image)
    edges = [grid.shape[1] - 16 - (3 - index) * 72 + 8 for index in range(3)]  # the left edges of the pairs
    for left, (height, width, _) in zip(edges, (image.shape for image in black), strict=True):
        below = grid[16 + 64 + 4 :, left : left + 64].max(-1) == 0
        assert below.sum() == height * width
        assert below[(64 - height) // 2 :, (64 - width) // 2 :][:height, :width].all()
