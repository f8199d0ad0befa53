"""Guards whose removal no test notices, with the reason: something else prevents the same problem."""

from __future__ import annotations

_NOTHING = "With nothing to do it changes nothing: the guard saves commands and a notification that nobody needs."

EXPLAINED: dict[str, str] = {
    "call_over: for j = i, math.min(i + 999, #list) do args[#args + 1] = list[j] end => "
    "for j = i, (function(a, b) return a end)(i + 999, #list) do args[#args + 1] = list[j] end": (
        "Beyond the list's end Lua reads nil, and appends nothing."
    ),
    "free_slots: if n ~= 0 then => if true then": _NOTHING,
    "submit: if #done > 0 then => if true then": _NOTHING,
    "settle: if #settled > 0 then => if true then": _NOTHING,
    "requeue: if put_back > 0 then => if true then": _NOTHING,
    "change_weights: if was ~= weight then => if true then": (
        "A group that keeps its weight also keeps the rest of its clock: the guard only saves work."
    ),
    "change_weights: local rest = math.max((tonumber(rings) - now) * (from > 0 and each.was or 1), 0) => "
    "local rest = (function(a, b) return a end)((tonumber(rings) - now) * (from > 0 and each.was or 1), 0)": (
        "Only rounding makes a clock ring before now, by less than it resolves; such a group is drawn next either way."
    ),
}
