"""What is made of files of images and masks, and which are refused."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files.image_files import image_files, mask_files
from sd_quant.files.images import MOST_PIXELS
from sd_quant.inference.source_images import read_source

pytestmark = pytest.mark.commit


@pytest.fixture
def saved(tmp_path):
    def saved(name: str, width: int = 64, height: int = 64, color: object = (200, 0, 0), mode: str = "RGB") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.new(mode, (width, height), color).save(path)
        return path

    return saved


def test_an_image_is_cropped_about_its_middle_what_is_transparent_is_white_and_a_camera_turns(saved, tmp_path):
    wide = Image.new("RGB", (400, 100), "blue")
    wide.paste((255, 0, 0), (100, 0, 300, 100))  # the middle, which is as wide as is asked for
    wide.save(tmp_path / "wide.png")
    source = read_source([tmp_path / "wide.png"], None, 128, 64, 0.5)
    assert source.images.shape == (1, 64, 128, 3) and source.images.dtype == np.uint8 and source.masks is None
    assert (source.images[0, :, 4:-4] == (255, 0, 0)).all()
    clear = saved("clear.png", color=(0, 0, 0, 0), mode="RGBA")
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by a quarter
    image = Image.new("RGB", (64, 64), "black")
    image.paste((255, 255, 255), (0, 0, 64, 32))
    image.save(tmp_path / "turned.png", exif=exif)
    white, turned = read_source([clear, tmp_path / "turned.png"], None, 64, 64, 0.5).images
    assert (white == 255).all() and (turned[:, 32:] == 255).all() and (turned[:, :32] == 0).all()


def test_images_and_masks_take_turns_and_samples_share_theirs(saved):
    images = [saved(f"{name}.png", color=(value, 0, 0)) for name, value in (("a", 10), ("b", 20))]
    masks = [saved(f"{value}.png", color=value, mode="L") for value in (0, 255)]
    source = read_source(images, masks, 64, 64, 0.5)
    given = source.arguments_of([0, 1, 2])
    assert [np.asarray(image)[0, 0, 0] for image in given["image"]] == [10, 20, 10]
    assert [np.asarray(mask)[0, 0] for mask in given["mask_image"]] == [0, 255, 0]
    twice = source.repeated(2)
    assert [image[0, 0, 0] for image in twice.images] == [10, 10, 20, 20] and len(twice.masks) == 4


def test_a_folder_is_taken_by_name_with_a_mask_for_each_image_or_one_for_all(saved, tmp_path):
    for name in ("b.PNG", "a.jpg", "c.webp"):
        saved(f"images/{name}")
    (tmp_path / "images/notes.txt").write_text("no image")
    images = image_files("infer.image", tmp_path / "images")
    assert [file.name for file in images] == ["a.jpg", "b.PNG", "c.webp"]
    for name in "bacd":
        saved(f"masks/{name}.webp", mode="L", color=255)
    masks = mask_files("infer.mask", tmp_path / "masks", images)
    assert [file.name for file in masks] == ["a.webp", "b.webp", "c.webp"]
    one = saved("one.png", mode="L", color=255)
    assert mask_files("infer.mask", one, images) == [one] * 3
    (tmp_path / "masks/b.webp").unlink()
    with pytest.raises(ConfigError, match=r"holds no mask for 1 of 3 images, such as b.PNG; expected one of the same"):
        mask_files("infer.mask", tmp_path / "masks", images)
    # and of its image's size
    image, mask = saved("a.png", 64, 32), saved("mask.png", 32, 64, 255, "L")
    with pytest.raises(ConfigError, match=r"mask.png is a mask of 32 x 64 pixels, and its image .*a.png has 64 x 32"):
        read_source([image], [mask], 64, 64, 0.5)


def test_an_image_that_is_too_large_is_not_decoded(saved, monkeypatch):
    """And one that Pillow itself refuses is too large, not damaged."""
    path = saved("a.png", 5824, 5824, 0, "1")
    assert 5824 * 5824 > MOST_PIXELS["PNG"]
    monkeypatch.setattr("PIL.Image.Image.convert", lambda *_: pytest.fail("it was decoded"))
    sentence = "a.png has 5824 x 5824 pixels, expected at most 33 million in a PNG; make it"
    with pytest.raises(ConfigError, match=sentence):
        read_source([path], None, 64, 64, 0.5)
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ConfigError, match="b.png is too large to be read .*; make it smaller"):
        read_source([saved("b.png")], None, 64, 64, 0.5)


def test_what_is_no_image_and_a_folder_without_images(saved, tmp_path):
    path = saved("a.png", 256, 256)
    for content in (b"", b"%!PS-Adobe-3.0 EPSF-3.0\n", path.read_bytes()[:100]):
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match="a.png cannot be read as an image .*; save it again as a PNG"):
            read_source([path], None, 64, 64, 0.5)
    path.unlink()
    for other in ("a", "a.gif"):
        (tmp_path / other).write_bytes(b"GIF89a")
    sentence = "^infer.image is .*, expected an image or a folder with images, whose names"
    for name in (".", "a.gif", "a", "pipe.png"):
        with pytest.raises(ConfigError, match=sentence):
            image_files("infer.image", tmp_path / name)
        if name == "a":
            os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ArtifactError, match="pipe.png cannot be read as an image .*no regular file"):
        read_source([tmp_path / "pipe.png"], None, 64, 64, 0.5)


def test_16_bits_keep_their_upper_8_and_do_not_become_white(tmp_path):
    """And every other mode becomes the colours that it shows."""
    ramp = np.linspace(0, 65535, 64).astype(np.uint16)[None].repeat(64, 0)
    Image.fromarray(ramp).save(tmp_path / "grey.png")
    source = read_source([tmp_path / "grey.png"], [tmp_path / "grey.png"], 64, 64, 0.5)
    assert (source.images[0, 0, :, 0] == ramp[0] >> 8).all() and (source.masks[0, 0] == ramp[0] >> 8).all()
    for mode in ("1", "L", "P", "LA", "PA", "RGBA", "CMYK"):
        path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
        Image.new("RGB", (128, 64), "white").convert("LA" if mode == "PA" else mode).save(path)
        assert (read_source([path], None, 64, 64, 0.5).images >= 253).all(), mode


def test_a_large_jpeg_is_decoded_at_a_size_that_suffices(tmp_path, monkeypatch):
    wide = Image.new("RGB", (2048, 1024), "blue")
    wide.paste((255, 0, 0), (512, 0, 1536, 1024))
    wide.save(tmp_path / "a.jpg", quality=95)
    mask = Image.new("L", (2048, 1024), 255)
    mask.save(tmp_path / "mask.png")
    seen, fit = [], ImageOps.fit
    monkeypatch.setattr(ImageOps, "fit", lambda image, *more: seen.append(image.size) or fit(image, *more))
    source = read_source([tmp_path / "a.jpg"], [tmp_path / "mask.png"], 64, 64, 0.5)
    assert seen == [(256, 128), (2048, 1024)], "and its own size is what a mask is compared with"
    assert (np.abs(source.images[0, :, 4:-4].astype(int) - (255, 0, 0)) < 8).all()
