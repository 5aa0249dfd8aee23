"""The training pictures: Fluent emoji, "modern" ones unless told otherwise, from npm's ``fluentui-emoji``, MIT licence.

``npm pack`` brings the SVG files, resvg rasterises them at 256 pixels on white, Pillow reduces them to 64. The caption
is the file's name: "a glossy icon of a rocket". Left out: every skin-tone variant, people and families, clock faces and
flags, which differ from one another too little at 64 pixels for a caption to pick one.
"""

import io
import re
import subprocess
import tarfile
from pathlib import Path

import numpy as np

PACKAGE = "fluentui-emoji@1.3.0"
LEFT_OUT = re.compile(
    r"-(default|light|medium|medium-light|medium-dark|dark|flat)$"
    r"|oclock|thirty|flag|(^|-)(man|men|woman|women|person|people|boy|girl|family|couple|kiss|baby-symbol)(-|$)"
)


def caption(name: str, kind: str = "glossy icon") -> str:
    """``red-apple`` -> ``a glossy icon of a red apple``."""
    words = name.replace("-", " ")
    article = "an" if words[0] in "aeiou" else "a"
    return f"a {kind} of {article} {words}"


def download(folder: Path) -> Path:
    """The package's tarball in ``folder``, fetched once."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / (PACKAGE.replace("@", "-") + ".tgz")
    if not archive.exists():
        subprocess.run(["npm", "pack", "--silent", "--pack-destination", str(folder), PACKAGE], check=True)
    return archive


def rasterise(svg: bytes, size: int) -> np.ndarray:
    """One picture as uint8 [size, size, 3] on white."""
    import resvg_py
    from PIL import Image

    png = bytes(resvg_py.svg_to_bytes(svg_string=svg.decode(), width=256, height=256))
    drawing = Image.open(io.BytesIO(png)).convert("RGBA")
    canvas = Image.new("RGBA", drawing.size, "white")
    return np.asarray(
        Image.alpha_composite(canvas, drawing).convert("RGB").resize((size, size), Image.Resampling.LANCZOS)
    )


def load_pictures(folder: Path, size: int = 64, style: str = "modern") -> tuple[list[str], np.ndarray]:
    """All captions and pictures, uint8 [N, size, size, 3], in the order of their names; cached in ``folder``.

    ``style`` is a folder of the package: modern, flat or high-contrast. The captions say nothing of it.
    """
    from tqdm import tqdm

    cache = folder / (f"pictures_{size}.npz" if style == "modern" else f"{style}_{size}.npz")
    if not cache.exists():
        with tarfile.open(download(folder)) as archive:
            drawings = {
                Path(member.name).stem: archive.extractfile(member).read()
                for member in archive
                if member.isfile() and f"/{style}/" in member.name and not LEFT_OUT.search(Path(member.name).stem)
            }
        names = sorted(drawings)
        pictures = np.stack([rasterise(drawings[name], size) for name in tqdm(names, desc="rasterise")])
        np.savez_compressed(cache, names=np.array(names), pictures=pictures)
    with np.load(cache) as stored:
        return [caption(name) for name in stored["names"].tolist()], stored["pictures"]
