"""Checks of the data: every row of every prompt source is read, tokenised and measured.

Guarantees: a fault names the key, the file and the line; of several in one source the first are named, and all are counted.
Faults of a file are found even if the model's tokenizer cannot be loaded.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from services.config import ConfigError, RunConfig
from services.config.data import FileSource, Source
from services.console.doctor import Finding, fault, note, ok, told
from services.console.doctor.model import with_model_path

if TYPE_CHECKING:
    from services.dataprep.prompts.catalogue import PromptSource
    from services.dataprep.prompts.rows import Needs, PromptRow

SHOWN = 3  # faulty rows of a source that are named
KEYS = ("prompt_field", "answer_field", "answer_pattern", "columns", "options", "task")
"""Keys of a source that a message about its rows may name."""
FIELDS = ("prompt_field", "answer_field")
"""Those whose value a message may name instead."""


def data(config: RunConfig) -> Iterator[Finding]:
    """Read and tokenise every row of every prompt source, and count prompts that are both trained on and evaluated."""
    trained: list[PromptSource] = []
    yield from _sources("data", config.data.sources, config, trained)
    yield from evaluation_data(config, trained)


def evaluation_data(config: RunConfig, trained: Sequence[PromptSource] = ()) -> Iterator[Finding]:
    """Read and tokenise every row of the prompt sources of evaluation."""
    found: list[PromptSource] = []
    yield from _sources("evaluation", config.evaluation.sources, config, found)
    if not found or not trained:
        return
    known = {digest for source in trained for digest in _digests(source, len(source))}
    for read in found:
        count = min(len(read), config.evaluation.prompts or len(read))
        if both := sum(digest in known for digest in _digests(read, count)):
            detail, remedy = (
                f"{both} of its {count} prompts are trained on, too",
                "remove them from either, unless it is intended",
            )
            yield note(f"evaluation source {read.spans[0].name}", detail, remedy)


def _digests(source: PromptSource, count: int) -> Iterator[int]:
    return (hash(tuple(source.prompt(row).tokens)) for row in range(count))


def _sources(section: str, sources: Sequence[Source], config: RunConfig, found: list[PromptSource]) -> Iterator[Finding]:
    """Check sources, and add those that can be read to `found`."""
    for index, source in enumerate(sources):
        yield from _source(f"{section} source {source.name}", f"{section}.sources.{index}", source, config, found)


def _source(what: str, key: str, source: Source, config: RunConfig, found: list[PromptSource]) -> Iterator[Finding]:
    for package in ("reasoning_gym",) if source.kind == "reasoning_gym" else ("pyarrow",) if source.kind == "parquet" else ():
        if importlib.util.find_spec(package) is None:
            detail = f"{key}.kind = {source.kind!r} needs the package {package}"
            yield fault(what, detail, "run pip install 'grpo[dataprep]'")
            return
    from services.dataprep.prompts.catalogue import PromptSource

    try:
        if isinstance(source, FileSource) and (faults := list(_faults(source, config))):
            yield from _of_rows(what, key, source, faults)
            return
        read = PromptSource(config, [source])
    except ConfigError as error:
        yield told(what, ConfigError(_with_key(str(with_model_path(error, config)), key, source)))
    except (OSError, ValueError, TypeError, RuntimeError) as error:  # what libraries raise for unexpected data
        path = f"{key}.{'path' if isinstance(source, FileSource) else 'task'}"
        yield fault(what, f"{path} = {getattr(source, path.rpartition('.')[2])!r}: {error}", "fix the data")
    else:
        found.append(read)
        yield ok(what, f"{len(read)} rows, the longest prompt has {read.longest} tokens")
        yield from (note(what, remark.what, remark.remedy) for remark in read.remarks)


def _of_rows(what: str, key: str, source: FileSource, faults: Sequence[str]) -> Iterator[Finding]:
    """Name the first faulty rows of a file, and count them."""
    for line in faults[:SHOWN]:
        yield told(what, ConfigError(_with_key(line, key, source)))
    if len(faults) > SHOWN:
        detail = f"{key}.path = {source.path!r}: {len(faults)} rows are faulty; the first are named"
        yield fault(what, detail, "fix or remove them")


def _faults(source: FileSource, config: RunConfig) -> Iterator[str]:
    """Return the faults of all rows of a file, one each; only the first of a file that cannot be read by lines."""
    from services.dataprep.prompts.rows import files_of, lines_of, read_jsonl_row, read_rows

    needs = _needs(source, config)
    try:
        if source.kind == "parquet":
            for row in read_rows(source, needs):
                yield from _empty(row, source, needs)
            return
        files = files_of(source)
    except ConfigError as error:
        yield str(error)
        return
    for where, line in chain.from_iterable(lines_of(file) for file in files):
        try:
            yield from _empty(read_jsonl_row(line, source, needs, where), source, needs)
        except ConfigError as error:
            yield str(error)


def _empty(row: PromptRow, source: FileSource, needs: Needs) -> Iterator[str]:
    """Return the fault of a row whose prompt is empty, or whose answer is although verifiers compare with it."""
    if isinstance(row.prompt, str) and not row.prompt.strip():
        yield f"{row.where}: field {source.prompt_field!r} is empty: fill in or remove the row"
    elif needs.answer and not row.answer.strip():
        yield f"{row.where}: field {source.answer_field!r} is empty: fill in or remove the row"


def _needs(source: FileSource, config: RunConfig) -> Needs:
    from services.dataprep.prompts.rows import Needs

    return Needs.of(config.verifiers, source)


def _with_key(line: str, key: str, source: Source) -> str:
    """Return a message about a source with the key that it is about and its value in front, unless it begins with one."""
    if re.match(r"(data|model|evaluation)\.[a-z_]+( =|:)", line) or "data.max_prompt_tokens = " in line:
        return line
    if isinstance(source, FileSource):
        line = line.removeprefix(f'path of source "{source.name}" = {source.path!r} ')
    found = [name for name in KEYS if re.search(rf"\b{name}\b( of|\))", line)]
    found += [name for name in FIELDS if f"field {getattr(source, name, None)!r} " in line]
    name = [*found, "path" if isinstance(source, FileSource) else "task"][0]
    for said in (f'{name} of source "{source.name}" = {getattr(source, name)!r} ', f" ({name} of its source)"):
        line = line.replace(said, "")
    return f"{key}.{name} = {getattr(source, name)!r}: {line}"
