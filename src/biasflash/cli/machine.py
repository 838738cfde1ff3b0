"""The facts of a machine that a report must carry to mean anything elsewhere."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
import typer

from biasflash import __version__


def _cpu() -> str:
    """The processor's market name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _driver() -> str | None:
    """The NVIDIA driver's version; None without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0] if found else None


def _triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def pick_device(asked: str | None) -> torch.device:
    """The device a command runs on: what was asked for, else the GPU if there is one.

    Raises:
        typer.BadParameter: no such device here.
    """
    try:
        found = torch.device(asked if asked is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except RuntimeError as error:
        raise typer.BadParameter(f"--device {asked}: no device of torch; accepted: cuda, cpu") from error
    if found.type not in ("cuda", "cpu"):
        raise typer.BadParameter(f"--device {asked}: no backend runs there; accepted: cuda, cpu")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(f"--device {asked}: torch sees no GPU here; accepted: cpu")
    return found


def facts(device: torch.device | str | None = None) -> dict[str, Any]:
    """Versions and hardware, ready for JSON.

    Args:
        device: the device that was used; None: the GPU if there is one, else the CPU. ``"device"`` of the answer is its
            market name.
    """
    has_gpu = torch.cuda.is_available()
    used = torch.device(device if device is not None else "cuda" if has_gpu else "cpu")
    found: dict[str, Any] = {
        "biasflash": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(used) if used.type == "cuda" else _cpu(),
        "device_type": used.type,
        "torch": torch.__version__,
        "triton": _triton(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": None,
        "driver": _driver(),
        "cuda": torch.version.cuda,
    }
    if has_gpu:
        properties = torch.cuda.get_device_properties(used if used.type == "cuda" else 0)
        found["gpu"] = properties.name
        found["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["gpu_processors"] = properties.multi_processor_count
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
    return found
