"""How answers are written: one way to write each sign, splitting outside of brackets, and units. Pure."""

from __future__ import annotations

import re

_REPLACED = {
    "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "π": "\\pi ", "∞": "\\infty ", "∪": "\\cup ", "∈": "\\in ",
    "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "²": "^2", "³": "^3", "½": " 1/2", "¼": " 1/4",
    "¾": " 3/4", "٪": "%", "°": "^\\circ ", "’": "'",
    "<=": "\\le ", ">=": "\\ge ", "!=": "\\ne ", "==": "=", ":=": "=", "~=": "\\approx ", "\\%": "%", "\\degree": "^\\circ ",
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "{,}": "\u2009", "\\left": "", "\\right": "",
    "\\displaystyle": "", "\\limits": "", "\\blacksquare": "", "\\square": "", "\\Box": "", "\\qquad": " ", "\\quad": " ",
    "\\lbrace": "\\{", "\\rbrace": "\\}", "\\lt": "<", "\\gt": ">", "\\leqslant": "\\le ", "\\geqslant": "\\ge ",
    "\\(": " ", "\\)": " ", "\\[": " ", "\\]": " ", "~": " ",
}  # fmt: skip
_REPLACE = re.compile(
    "|".join(re.escape(old) + r"(?![a-zA-Z])" * old[1:].isalpha() for old in sorted(_REPLACED, key=len, reverse=True))
)
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal|sf)?|math(?:rm|bf|it|sf)|mbox|operatorname)\s*\{([^{}]*)\}")
# "$5 and $6" are amounts, "$5 + 6$" is mathematics.
SPAN = r"\$\$[^$]*\$\$|\$(?!\d[^$]*\s\$)[^$]*\$(?!\d)"
_SPAN = re.compile(SPAN)
_MATRIX = re.compile(
    r"(?:[\[(]\s*)?\\begin\{(?:array\}\{[^{}]*|[bp]?matrix)\}(.*?)\\end\{(?:array|[bp]?matrix)\}(?:\s*[\])])?", re.DOTALL
)
_PLAIN = re.compile(r"[\w\s.,+-]*", re.ASCII)
_SIGNS = {"plus": "+", "minus": "-", "times": "\\times ", "x": "\\times ", "multiplied by": "\\times ", "divided by": "/"}
_OPERATIONS = re.compile(rf"(?<=[\d)])\s+({'|'.join(_SIGNS)})\s+(?=[\d(-])")
MONTH = r"(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
MORE = r"(?:more|less|fewer|greater|higher|lower)"
COMMA = re.compile(r"\s*,\s*(?:\\ )?")


def plain(text: str) -> str:
    """Return the text without LaTeX that does not change a value, with one way to write each sign; `¤` stands for dollars."""
    if not _PLAIN.fullmatch(text):
        text = text.replace("\\$", "¤")
        if "\\begin" not in text:
            text = re.sub(r"\\\\(?=[a-zA-Z])", r"\\", text)
        text = _SPAN.sub(lambda m: f" {m[0].strip('$')} ", text)
        text = re.sub(r"\$(?=\s?[\d.])|(?<=\d)\s?\$", "¤", text).replace("$", " ")
        for _ in range(2):  # of text within text
            text = _TEXT.sub(r" \1 ", text)
        text = _REPLACE.sub(lambda m: _REPLACED[m[0]], text)
        text = _MATRIX.sub(r"\\begin{pmatrix}\1\\end{pmatrix}", re.sub(r"\\!\s*", "", text))
        text = re.sub(r"(?<!\\)\\[,;:> ]", "\u2009", text)
        text = re.sub(r"\u2009(?!\d{3}(?!\d))|(?<!\d)\u2009", " ", text)
        text = re.sub(r"(?<=[\dA-Za-z)}])\s?\*\*\s?(?=[\dA-Za-z({-])", "^", text).replace("**", " ").replace("__", " ")
        text = re.sub(r".*(?:\\implies|\\Rightarrow|\\iff|\\Leftrightarrow|⟹|⇒)\s*", "", text, flags=re.DOTALL)
        text = re.sub(r"(?<![a-zA-Z\\])(sqrt|pi|sin|cos|tan|log|ln)(?![a-zA-Z])", r"\\\1 ", text)
        text = re.sub(r"(?:\\sqrt|√)\s*\(([^()]*)\)|√\s*(\d+|\w)", r"\\sqrt{\1\2}", text)
    text = _OPERATIONS.sub(lambda m: _SIGNS[m[1]], text)
    return re.sub(r"\s+", " ", text.replace("\n", " ").replace("\t", " ")).strip(" ")


def masked(text: str) -> str:
    """Return the text with everything inside brackets replaced, so that its places stay."""
    depth, out = 0, list(text)
    for i, character in enumerate(text):
        closes = character in ")]}"
        depth -= closes
        if depth > 0:
            out[i] = "\0"
        depth = max(depth, 0) + (character in "([{")
    return "".join(out)


def balanced(text: str) -> bool:
    """Return whether no bracket closes that was not opened within the text."""
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0


def split(text: str, separator: re.Pattern[str], grouped: bool = True) -> list[str]:
    """Split at a separator outside of brackets. `grouped`: a comma within `1,234` separates nothing."""
    parts, begin = list[str](), 0
    for match in separator.finditer(masked(text)):
        if grouped and separator is COMMA and match[0] == "," and _in_group(text, match.start()):
            continue
        parts.append(text[begin : match.start()])
        begin = match.end()
    return [*parts, text[begin:]]


def _in_group(text: str, at: int) -> bool:
    """Return whether the comma at a place separates thousands."""
    return (
        re.search(r"(?<![\d.])\d{1,3}(?:,\d{3})*$", text[:at]) is not None
        and re.match(r"\d{3}(?!\d)", text[at + 1 :]) is not None
    )


_UNIT_LETTERS = "mgshlLAVNJWKCFkt"
_ATTACHED = (
    "[kcmµn]m|k?g|mg|m?[lL]|ft|in|lbs?|oz|hrs?|min|sec|s|m|h|[ap]m|mph|km/h|m/s|kWh|dollars|cents|st|nd|rd|th|units?|feet|inches"
)
_UNIT = re.compile(
    rf"(?:\s*\^\\circ\s*[CF]?|(?:{_ATTACHED})\b(?!\s*[=^+*(]\s*[^23])|\s*¤|\s*[€£¥₹]|\s*/\s*(?=[a-zA-Z])|"
    rf"\s+(?!pi\b|and\b)(?:[a-zA-Zµ]{{2,}}|[{_UNIT_LETTERS}](?![a-zA-Z(])))[a-zA-Zµ.\s/·'-]*(?:\^?\{{?[23]\}}?)?(?:\s*/\s*[a-zA-Z]+)?"
)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# "5 or" and "5 log" are no quantities with a unit.
_NO_UNIT = frozenset(
    re.findall(
        r"\w+",
        "it he she we they or and to plus minus times over mod sin cos tan log ln exp sqrt but not because is are was has have "
        "which than",
    )
)
_SILENT = frozenset(re.findall(r"\w+", "in of the a an total per each all left for st nd rd th more altogether about"))
_SYNONYMS = {
    name: names.split()[0]
    for names in (
        "cm centimeter centimetre", "m meter metre", "km kilometer kilometre", "mm millimeter millimetre", "kg kilogram",
        "g gram gramme", "mg milligram", "h hour hr", "min minute", "s second sec", "ft foot feet", "in inch inches", "mi mile",
        "lb pound", "oz ounce", "l liter litre", "ml milliliter millilitre", "¤ $ dollar usd buck", "¢ cent", "€ euro eur",
        "£ gbp", "° degree deg", "°c", "°f", "rad radian", "mph milesph mileph",
        "day", "week", "month", "year yr", "percent", "am", "pm", "kph kmh kilometersph kilometreph", "yd yard",
    )
    for name in names.split()
}  # fmt: skip
KNOWN = frozenset(f"{unit}{power}" for unit in _SYNONYMS.values() for power in ("", "2", "3"))
"""Units of measurement with their squares and cubes; any other word is a word of what is counted."""


def is_unit_word(word: str) -> bool:
    """Return whether a word after a number may be its unit."""
    return word.lower().strip(".,") not in _NO_UNIT | _SILENT


def are_operators(words: list[str]) -> bool:
    """Return whether any of these words joins or negates statements, so that it is no unit."""
    return bool(_NO_UNIT.intersection(words))


def units_after(rest: str, currency: str) -> tuple[frozenset[str] | None, int]:
    """Return the units that follow a number and the scale (`5 million`); None if something other than a unit follows."""
    found = {_SYNONYMS.get(currency, currency)} - {""}
    if not rest.strip():
        return frozenset(found), 1
    if _UNIT.fullmatch(rest) is None:
        return None, 1
    words = re.findall(r"[a-zA-Zµ]+|[¤€£¥₹]|\\circ\s*[cf]?|[23]", rest.lower().replace(" per hour", "ph"))
    if are_operators(words) or len(words) > 7:
        return None, 1
    scale, power = 1, ""
    for word in words:
        if word in _SCALES:
            scale *= _SCALES[word]
        elif word in ("2", "3") or word in ("square", "sq", "cubic", "cu"):
            power = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}.get(word, word)
        elif word.startswith("\\circ"):
            found.add(word.replace("\\circ", "°").replace(" ", ""))
        elif word not in _SILENT:
            single = word[:-1] if word.endswith("s") and len(word) > 2 else word
            found.add(_SYNONYMS.get(word) or _SYNONYMS.get(single) or single)
    return frozenset(f"{unit}{power}" for unit in found), scale


def same_units(gold: frozenset[str], found: frozenset[str]) -> bool:
    """Return whether two numbers do not state different units; one that states none has any."""
    if not gold or not found or any(unit.startswith("unit") for unit in gold | found):
        return True
    known = gold & KNOWN, found & KNOWN
    return known[0] == known[1] if all(known) else not gold.isdisjoint(found)
