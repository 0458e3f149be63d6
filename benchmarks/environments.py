"""One virtual environment per peer, from its pinned requirements file; made once, kept under the scratch folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def peer_python(requirements: Path, folder: Path) -> Path:
    """Return the interpreter of the environment in ``folder`` that holds ``requirements``, making it if need be.

    torch, where it is required, is installed first and pinned afterwards, so that nothing else chooses another build.
    """
    python, ready = folder / "bin" / "python", folder / ".ready"
    wanted = requirements.read_text(encoding="utf-8")
    if ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return python
    print(f"making the environment of {requirements.stem}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch = [line for line in wanted.splitlines() if line.startswith("torch==")]
    if torch:
        subprocess.run([*install, *torch], check=True)
    subprocess.run([*install, "-c", str(requirements), "-r", str(requirements)], check=True)
    if torch:
        ask = [str(python), "-c", "import torch; print(torch.version.cuda)"]
        if subprocess.run(ask, check=True, stdout=subprocess.PIPE, text=True).stdout.strip() != "None":
            raise SystemExit(f"{requirements.stem}: pip chose a CUDA build of torch; point pip at the CPU builds")
    ready.write_text(wanted, encoding="utf-8")
    return python
