"""Answers of `grpo inspect` for a terminal. Text of others is made printable, and is never markup."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from services.console.printable import cell, printable
from services.operations.figures import NOTHING, duration
from services.operations.inspection.buffer import Buffer, BufferGroup
from services.operations.inspection.completions import Completion, Passage
from services.operations.inspection.deadletters import DeadLetterBody, DeadLetters, RequeueAnswer
from services.operations.inspection.group import Group
from services.operations.inspection.step import Plan, Spread, Step

ROUNDING = 1e-12  # numbers below are what arithmetic left of 0
HEX_SHOWN = 512  # digits of a body that cannot be decoded; --json has all


def buffer_table(found: Buffer) -> RenderableType:
    """The table's figures, and a row a group."""
    by = "" if found.sort == "order" else f", by {found.sort}"
    facts = [
        ("groups", f"{found.size:,} of {found.capacity:,}"),
        ("sampler, remover", f"{found.sampler}, {found.remover}"),
        ("uses", f"{_histogram(found.uses)}  (max_uses {found.max_uses or 'unbounded'})"),
        ("ever", f"{found.inserted:,} inserted, {found.drawn:,} drawn"),
        ("next step", str(found.next_step)),
    ]
    if found.weight_sum is not None:
        facts.insert(2, ("sum of weights", _number(found.weight_sum)))
    weighted = found.weight_sum is not None
    table = _table("group", "issued", "versions", "lag", "uses", *(["weight", "p"] if weighted else []), "reward", "length")
    for name in ("source", "generator"):
        table.add_column(name, header_style="dim")
    for row in found.groups:
        weights = [_number(row.weight), _share(row.probability)] if weighted else []
        table.add_row(cell(row.group), *_of_group(row, weights))
    shown = f"groups {found.offset:,} to {found.offset + len(found.groups) - 1:,}" if found.groups else "no groups"
    order = f"{shown}{by}{', highest first' if found.reverse else ''}"
    return Lines(_facts(facts), Text(), Text(order, "bold"), table)


def _of_group(row: BufferGroup, weights: Sequence[str]) -> Iterable[str | Text]:
    if not row.readable:
        return (NOTHING, NOTHING, NOTHING, str(row.uses), *weights, Text("its header cannot be read", "red"))
    return (
        str(row.seq), _range(row.oldest, row.newest), _or_dash(row.lag), str(row.uses), *weights,
        f"{_number(row.reward_mean)} ± {_number(row.reward_std)}",
        f"{row.length_min}/{row.length_mean:.1f}/{row.length_max}", cell(row.source), cell(row.generator),
    )  # fmt: skip


def group_tables(found: Group) -> RenderableType:
    """Where a group is, its prompt, and each completion below a line of its figures."""
    facts: list[tuple[str, str | Text]] = [("place", cell(found.where))]
    if found.holder:
        held = f"claim {found.holder.fence}, lease renewed {duration(found.holder.idle_s)} ago"
        facts.append(("held by", cell(f"{found.holder.consumer} ({held})")))
    if found.attempts or found.expiries:
        facts.append(("so far", f"{found.attempts} failures, {found.expiries} expired leases"))
    if found.ended_at:
        facts.append(("ended", f"{found.outcome}, {_when(found.ended_at)}"))
    if found.steps:
        facts.append(("steps", ", ".join(f"{s.step} ({'committed' if s.committed else 'prepared'})" for s in found.steps)))
    if found.seq is not None:
        facts.append(("issued", str(found.seq)))
    if found.uses is not None:
        facts.append(("uses", str(found.uses)))
    if found.weight is not None:
        chance = "" if found.probability is None else f"  (p {_share(found.probability)})"
        facts.append(("weight", _number(found.weight) + chance))
    if found.source is not None:
        facts.append(("source", cell(found.source)))
    if found.generator is not None:
        facts.append(
            ("made by", cell(f"{found.generator} in {_number(found.generate_s)} s, scored in {_number(found.score_s)} s"))
        )
    if found.answer is not None:
        facts.append(("answer", cell(found.answer)))
    parts: list[RenderableType] = [_facts([("group", found.group), *facts])]
    if found.prompt:
        parts += [Text(), _panel(f"prompt, {found.prompt.tokens} tokens", found.prompt)]
    for completion in found.completions:
        parts.append(_panel(_line(completion), completion.passage))
    last = found.offset + len(found.completions)
    if found.completions and (found.offset or last < found.size):
        parts.append(Text(f"completions {found.offset} to {last - 1} of {found.size}", "dim"))
    return Lines(*parts, *(cell(f"note: {note}", "yellow") for note in found.notes))


def _line(found: Completion) -> str:
    scores = "  ".join(f"{verifier} {_number(score)}" for verifier, score in found.scores.items())
    versions = ", ".join(f"{span.version} [{span.start}, {span.end})" for span in found.spans)
    versions = versions or _range(found.oldest, found.newest)
    tools = f", {found.tool_tokens} of tools" if found.tool_tokens else ""
    return (
        f"{found.index}: reward {_number(found.reward)}  advantage {_number(found.advantage)}  {scores}  "
        f"{_or_dash(found.length)} tokens{tools}{', truncated' if found.truncated else ''}  versions {versions}"
    )


def step_tables(found: Step) -> RenderableType:
    """A step's plan with a row a rank and a row a group; of a retired one its metrics."""
    if found.plan is None:
        facts: list[tuple[str, str | Text]] = [("step", f"{found.step}, trained; a checkpoint covers it and its plan is deleted")]
        if found.record is None:
            return Lines(_facts(facts), Text("its metrics record is gone too", "yellow"))
        return Lines(_facts(facts), Text(), _metrics(found.record))
    plan = found.plan
    facts = [
        ("step", f"{found.step}, {found.state}"),
        ("groups", f"{plan.size:,}: {plan.fresh:,} fresh, {plan.size - plan.fresh:,} replayed"),
        ("tokens", f"{plan.total_tokens:,} with a prompt each, {plan.response_tokens:,} in the loss"),
        ("mini-batches", ", ".join(_mini_batches(plan))),
        ("advantages", _spread(plan.advantage)),
        ("importance weights", _spread(plan.weight)),
    ]
    ranks = _table("rank", "rows", "empty", "responses", "tokens", "fill")
    for rank in plan.ranks:
        ranks.add_row(
            str(rank.rank), str(rank.rows), str(rank.empty), f"{rank.responses:,}", f"{rank.tokens:,}",
            NOTHING if rank.fill is None else f"{rank.fill:.0%}",
        )  # fmt: skip
    groups = _table("group", "use", "uses", "versions", "lag", "weight", "advantage", "responses", "masked", "in the loss")
    for row in plan.groups:
        groups.add_row(
            cell(row.group), "fresh" if row.fresh else "replayed", _or_dash(row.uses), _range(row.oldest, row.newest),
            _or_dash(row.lag), _number(row.weight), _spread(row.advantage), str(row.responses), str(row.masked),
            f"{row.trained_tokens:,}",
        )  # fmt: skip
    last = plan.offset + len(plan.groups) - 1
    more = [Text(f"groups {plan.offset:,} to {last:,} of {plan.size:,}", "dim")] if len(plan.groups) < plan.size else []
    return Lines(_facts(facts), Text(), ranks, Text(), groups, *more)


def _mini_batches(plan: Plan) -> Iterable[str]:
    for rows, denominator in zip(plan.mini_batch_rows, plan.denominators, strict=False):
        yield f"{rows} rows a rank over {_number(denominator)}"


def dead_letters_table(found: DeadLetters) -> RenderableType:
    """A row a dead letter."""
    if not found.letters:
        return Text("no dead letters" if not found.total else f"no dead letters before that, of {found.total:,}")
    table = Table(box=None, padding=(0, 2), show_edge=False)
    for name in ("id", "when", "ticket", "failed", "reason"):
        table.add_column(name, header_style="dim", overflow="fold", no_wrap=name in ("id", "when"))
    for row in found.letters:
        table.add_row(row.id, _when(row.at), cell(row.ticket), "yes" if row.failed else "not issued", cell(row.reason))
    more = [Text(f"{found.total:,} in all; more with --before {found.next}", "dim")] if found.next else []
    return Lines(table, *more)


def dead_letter_table(found: DeadLetterBody) -> RenderableType:
    """All there is in a dead letter."""
    facts: list[tuple[str, str | Text]] = [
        ("dead letter", found.id),
        ("when", _when(found.at)),
        ("ticket", cell(found.ticket)),
        ("failed", "yes" if found.failed else "no: nobody had issued its ticket"),
        ("reason", cell(found.reason)),
        ("body", f"{found.kind}, {found.body_bytes:,} bytes"),
    ]
    if found.hex is not None:
        cut = f"… {len(found.hex) // 2:,} bytes in all, see --json" if len(found.hex) > HEX_SHOWN else ""
        return Lines(_facts(facts), Text(), Text(found.hex[:HEX_SHOWN] + cut))
    return Lines(_facts(facts), Text(), _facts([(name, cell(value)) for name, value in (found.fields or {}).items()]))


def requeue_table(found: RequeueAnswer) -> RenderableType:
    """A row a dead letter that was to be put back."""
    table = Table(box=None, padding=(0, 2), show_edge=False)
    for name in ("id", "ticket", ""):
        table.add_column(name, header_style="dim", overflow="fold")
    for row in found.requeued:
        table.add_row(cell(row.id), cell(row.ticket), Text("already put back" if row.before else "requeued", "green"))
    for row in found.refused:
        table.add_row(cell(row.id), cell(row.ticket), cell(f"refused: {row.why_not}", "yellow"))
    return table if table.row_count else Text("no dead letters")


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=None, padding=(0, 1), show_edge=False)
    table.add_column(first, header_style="dim")
    for name in numbers:
        table.add_column(name, header_style="dim", justify="right", no_wrap=True)
    return table


def _facts(facts: Sequence[tuple[str, str | Text]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    return table


def _metrics(record: Mapping[str, float | None]) -> Table:
    return _facts([(printable(name), _number(value)) for name, value in sorted(record.items())])


def _panel(title: str, passage: Passage | None) -> RenderableType:
    if passage is None:
        return cell(title)
    text = cell(passage.text, keep_lines=True) if passage.text is not None else Text(str(passage.token_ids), "dim")
    return Panel(text, title=cell(title), title_align="left", border_style="dim")


def _number(value: float | None) -> str:
    if value is None:
        return NOTHING
    if abs(value) < ROUNDING:
        return "0"
    whole = float(value).is_integer() or 1e4 <= abs(value) < 1e12
    return f"{value:,.0f}" if whole else f"{value:.4g}"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3%}"


def _or_dash(value: int | None) -> str:
    return NOTHING if value is None else str(value)


def _range(first: int | None, last: int | None) -> str:
    return NOTHING if first is None or last is None else str(first) if first == last else f"{first}–{last}"


def _spread(value: Spread | None) -> str:
    return NOTHING if value is None else f"{_number(value.min)} / {_number(value.mean)} / {_number(value.max)}"


def _histogram(uses: Mapping[int, int]) -> str:
    return ", ".join(f"{groups:,} used {times}×" for times, groups in sorted(uses.items())) or "none"


def _when(at: datetime.datetime) -> str:
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
