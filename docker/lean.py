"""Remove from an environment what dataprep never loads: `python lean.py ENVIRONMENT`. It halves the image.

Guarantees: everything removed is listed below with the reason; the build fails unless the rest still reads every kind of prompts.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

UNUSED = (
    "pyarrow/libarrow_flight.so*", "pyarrow/_flight*", "pyarrow/flight.py",  # a table server
    "pyarrow/libarrow_s3.so*", "pyarrow/_s3fs*",  # files come from volumes
    "pyarrow/_substrait*",  # a query language
    "pyarrow/include", "pyarrow/src",  # for compiling against it
    "pyarrow/libarrow_python*.so.*.*.*", "pyarrow/libarrow_python.so",  # the same library under three names
    "pyarrow/libarrow_python_flight*",
    "matplotlib/mpl-data/sample_data", "matplotlib/mpl-data/images",  # reasoning-gym imports it but draws nothing
    "matplotlib/mpl-data/fonts",
    "fontTools/cffLib", "fontTools/cu2qu", "fontTools/feaLib", "fontTools/merge", "fontTools/misc/bezierTools*",
    "fontTools/otlLib", "fontTools/pens", "fontTools/qu2cu", "fontTools/subset", "fontTools/svgLib", "fontTools/ttLib",
    "fontTools/ufoLib", "fontTools/varLib", "pillow.libs/libavif*", "PIL/_avif*",
    "hf_xet",  # faster downloads from the hub; without it HTTP is used
    "numpy/_core/lib",
    # The scaler uses two APIs of a cluster's sixty, of the asyncio client; the package is 75 MB with all of both clients.
    "kubernetes/client/api/[a-z]*_api.py", "kubernetes/client/models/v[12]*.py", "kubernetes/aio/client/api/[abd-z]*_api.py",
    "kubernetes/aio/client/api/ce*_api.py", "kubernetes/aio/client/api/coord*_api.py", "kubernetes/**/*_test.py",
    "**/*.pyi", "**/*.pxd", "**/*.pyx", "**/*.h", "**/*.hpp",  # for compilers and type checkers
)  # fmt: skip

SYMBOLS = ("pyarrow", "kiwisolver", "yaml")
"""Packages whose libraries are stripped of symbols. strip would break those of other packages."""

CHECK = """
import reasoning_gym, pyarrow, pyarrow.parquet, tokenizers
import kubernetes.aio.client.api.core_v1_api, kubernetes.aio.client.api.custom_objects_api, kubernetes.aio.stream
reasoning_gym.create_dataset('basic_arithmetic', size=1, seed=1)[0]
pyarrow.parquet.write_table(pyarrow.table({'a': [[{'b': 'c'}]]}), '/tmp/check.parquet')
assert pyarrow.parquet.read_table('/tmp/check.parquet').to_pylist() == [{'a': [{'b': 'c'}]}]
"""
"""What dataprep and the scaler need of the reduced libraries."""


def lean(site: Path) -> None:
    """Delete what is listed, tests, and the symbols of the largest libraries."""
    for pattern in UNUSED:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in sorted(site.rglob("tests"), reverse=True):
        if path.is_dir():
            shutil.rmtree(path)
    for path in (path for name in SYMBOLS for path in (site / name).glob("*.so*")):
        subprocess.run(["strip", "--strip-unneeded", str(path)], check=True, capture_output=True)


if __name__ == "__main__":
    environment = Path(sys.argv[1])
    (packages,) = environment.glob("lib/python3*/site-packages")
    lean(packages)
    if (packages / "reasoning_gym").exists():
        subprocess.run([environment / "bin/python", "-B", "-W", "ignore", "-c", CHECK], check=True)
