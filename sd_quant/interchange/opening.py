"""Which reader opens a candidate."""

from importlib.util import find_spec
from pathlib import Path

from sd_quant.errors import ArtifactError, ConfigError, ResourceError
from sd_quant.interchange import READERS, Reader
from sd_quant.interchange.candidate import Candidate
from sd_quant.models.checkpoint import Checkpoint


def reader_of(path: Path) -> Reader:
    """The one reader that recognizes ``path``.

    Raises ConfigError where nothing is, or nobody here knows what it is, ArtifactError for what has two meanings, and
    ResourceError where a package is missing without which it cannot be decoded.
    """
    if not path.exists():
        raise ConfigError(f"the candidate {path} does not exist; give a file or a folder")
    found = [reader for reader in READERS.values() if reader.recognizes(path)]
    if not found:
        known = "; ".join(reader.what for reader in READERS.values())
        raise ConfigError(f"{path} is of no kind that is known here, expected one of: {known}; or a run of quantize")
    if len(found) > 1:
        raise ArtifactError(
            f"{path} can be read in {len(found)} ways ({', '.join(reader.name for reader in found)}), expected one; "
            "give the file that is meant, or a folder with nothing else in it"
        )
    (reader,) = found
    if reader.package is not None and find_spec(reader.package) is None:
        raise ResourceError(
            f"{path} is decoded by the package {reader.package}, which is not installed; "
            f"pip install 'sd-quant[{reader.package}]'"
        )
    return reader


def open_candidate(path: Path, checkpoint: Checkpoint) -> Candidate:
    """The candidate at ``path`` as the denoiser of ``checkpoint``; no weight is read. Raises what its reader raises."""
    return reader_of(path).module.read(path, checkpoint)
