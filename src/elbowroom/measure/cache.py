"""What was measured, kept on disk: one JSON file per device, set of versions and settings."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch

# Operator key → seconds, workspace bytes, and bytes of its outputs where tracing is wrong about them.
OpCosts: TypeAlias = dict[str, tuple[float, int, tuple[int, ...]]]

ENVIRONMENT = "ELBOWROOM_CACHE"
FORMAT = 3  # of the files; raised when what was measured before is not to be trusted


def cache_folder() -> Path:
    """Where measurements are kept: `$ELBOWROOM_CACHE`, or `elbowroom` in the user's cache folder."""
    if chosen := os.environ.get(ENVIRONMENT):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elbowroom"


def setting_of(device: torch.device) -> dict[str, str]:
    """Everything besides the operator that its time and workspace may depend on."""
    setting = {"torch": torch.__version__, "device": device.type, "deterministic": str(_deterministic())}
    if device.type == "cuda":
        setting |= {
            "name": torch.cuda.get_device_name(device),
            "cuda": str(torch.version.cuda),
            "cudnn": f"{torch.backends.cudnn.version()} {torch.backends.cudnn.benchmark}",
            "precision": torch.get_float32_matmul_precision(),
        }
    else:
        setting |= {"threads": str(torch.get_num_threads()), "cpu": torch.backends.cpu.get_cpu_capability()}
    return setting


@contextmanager
def cached_costs(device: torch.device) -> Iterator[OpCosts]:
    """The costs known for a device; whatever is added inside the block is kept. Losing the file loses only time."""
    path = _path_of("operators", device)
    costs = _read(path)
    known = len(costs)
    yield costs
    if len(costs) > known:
        _write(path, {"setting": setting_of(device), "operators": {**_read(path), **costs}})


def kept_numbers(what: str, device: torch.device) -> dict[str, float]:
    """Numbers that were measured of a device before; nothing if they were not."""
    try:
        entries = json.loads(_path_of(what, device).read_text())[what]
        return {str(name): float(number) for name, number in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def keep_numbers(what: str, device: torch.device, numbers: Mapping[str, float]) -> None:
    """Keep them for the next time."""
    _write(_path_of(what, device), {"setting": setting_of(device), what: dict(numbers)})


def _path_of(what: str, device: torch.device) -> Path:
    digest = hashlib.sha256(json.dumps(setting_of(device), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"{what}-{FORMAT}-{digest}.json"


def _read(path: Path) -> OpCosts:
    try:
        entries = json.loads(path.read_text())["operators"]
        return {key: (float(time), int(size), tuple(map(int, sizes))) for key, (time, size, sizes) in entries.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write(path: Path, data: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(data))
        os.replace(draft, path)
    except OSError:
        pass  # a read-only home is no reason not to train


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()
