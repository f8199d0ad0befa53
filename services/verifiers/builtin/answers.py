"""Finds the answer in a reply: which text of it is the statement that counts.

Marked: the last of `\\boxed{…}`, `<answer>…</answer>` and `#### …`; boxes with nothing but "and", commas or space between them
are one list. Without a mark: what follows the last "answer is". Without that: the last complete number phrase. If a box holds no
statement, or what seems to be the last number phrase is none, the reply has no answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from services.verifiers.builtin.notation import MONTH, MORE, SPAN, is_unit_word
from services.verifiers.builtin.statements import CHARACTERS, Items, Number, Statement, Words, is_name, read

TAIL_CHARACTERS = 2_000
"""Length of the reply's end that is searched for an unmarked answer."""
STATED_WORDS, CUT_WORDS = 5, 2
"""An unmarked answer in words has at most this many, and this many if it is a part of a sentence."""

_HEADING = re.compile(r"####[ \t]*([^\n]*)")
_BOX = re.compile(r"\\f?box(?:ed)?\s*(?:(\{)|(\S))")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_JOINT = re.compile(
    r"(?:\s|[,;&$.]|\\(?:quad|qquad|\\|[,;:()\[\] ])|\\text\s*\{\s*,?\s*(?:and|or)?\s*\}|\band\b|\bor\b|"
    r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?\s*=)*"
)
_STATED = re.compile(
    r"(?i)\b(?:answers?|(?:correct|right|best) (?:option|choice))\b(?:\s+(?:to|for|of|in)\b[^.\n:]{0,60}?)?[\s*_]*"
    r"(?:\b(?:is|are|would be|equals)\b|:|=)[\s*_:]*"
)
_SENTENCE = re.compile(r"\n|[.?](?=[\s*\"'$)]|$)|(?<!\d)!(?=\s|$)")
_RESTATED = re.compile(
    r",?\s*\b(?:which (?:is|equals|gives|makes|means)|that is|that's|i\.e\.|namely|or equivalently|equivalently|making it),?\s+"
)
_NOT_BUT = re.compile(r"(?i)not\b.*?\bbut(?:\s+rather)?\b\s*(.*)", re.DOTALL)
_MODIFIED = re.compile(
    rf"(?i)(?:not|at (?:least|most)|{MORE} than|up to|over|under|below|above|twice|double|triple|half|from|between)\b"
)
_CLAUSE = re.compile(
    r"[,;]?\s+(?:because|since|as|so|when|where|if|assuming|given|after|before|while|who|that|thus|hence|therefore|for|with|by)\s|"
    r",\s+(?!and\b|or\b)(?=[a-zA-Z]{2,}\b(?!\s*=))|\s+[-–—]+\s+(?=[a-zA-Z]{2})|\s\((?=[a-zA-Z ]+\))|"
    rf"\s+(?:and|or|but)\s+(?!{MORE}\b)(?=[A-Za-z]{{2,}}\b)"
)
_MATH_BLOCK = re.compile(r"\\\[(.*?)\\\]|\$\$(.*?)\$\$", re.DOTALL)
_CALCULATOR = re.compile(r"<<[^<>]*>>")
_BULLET = re.compile(r"(?m)^[ \t]*(?:[-*•]|\d+[.)])[ \t]+(?=\S*[A-Za-z(])")
_SPAN = re.compile(rf"{SPAN}|\\\(.*?\\\)|\\\[.*?\\\]", re.DOTALL)
_GLUE = "\u2063"  # stands for a space within a span of mathematics
_OPERATOR = re.compile(r"[-+*/^=<>≤≥≠≈×·÷−–:|,;]+|\\(?:times|cdot|div|le|ge|leq|geq|lt|gt|ne|pm|approx|in|cup|cap|equiv)")
_VARIABLE = re.compile(r"[a-zA-Z](?:_\w+|_\{\w+\})?,?")
_JOINS = frozenset(["and", "or", "minus", "plus", "times", "to"])
_STARTS = re.compile(r"[(\[{*_\"'$¤€£¥₹|±+−–-]*(?:\d|\.\d|\\[a-zA-Z{(\[]|√|π|∞)")
_MONTH = re.compile(MONTH)
_UNIT_WORD = re.compile(r"[a-zA-Zµ°²³^/]{1,20}\d?[,.]?")


def final_statement(reply: str) -> Statement | None:
    """Return the statement that is the answer of a reply, or None if there is none."""
    marked = marked_answer(reply)
    if marked is None:
        return _unmarked(reply[-TAIL_CHARACTERS:])
    kind, text = marked
    found = read(text)
    if found is not None or (kind == "box" and _STATED.search(text) is None):
        return found
    return _unmarked(text[-TAIL_CHARACTERS:])


def marked_answer(reply: str) -> tuple[str, str] | None:
    """Return what the last mark is, `box`, `tag` or `heading`, and its content, "" if it has no end; None without a mark."""
    boxed = max(reply.rfind("\\boxed"), reply.rfind("\\fbox"))
    place, found = boxed, ("box", "") if boxed >= 0 else None
    at = reply.lower().rfind("<answer>") if "<" in reply else -1
    if at >= 0 and (match := _TAG.match(reply, at)) is not None and not at < boxed < match.end() and at > place:
        place, found = at, ("tag", match[1].strip())
    for match in _HEADING.finditer(reply, max(place, 0)):
        # Four signs also mark a heading; then text follows, and the line is no number.
        closing = not reply[match.end() :].strip()
        if match[1].strip() and (closing or isinstance(read(match[1]), Number)):
            found = ("heading", match[1].strip())
    return ("box", _boxes(reply, boxed)) if found == ("box", "") else found


def _boxes(reply: str, at: int) -> str:
    """Return the content of the box at a place, together with the boxes that are joined to it."""
    contents: list[str] = []
    begin = end = len(reply)
    while at >= 0:
        content, end = _box(reply, at)
        if contents and (end > begin or _JOINT.fullmatch(reply[end:begin]) is None):
            break
        if not content or len(content) > CHARACTERS:
            return "" if not contents else ", ".join(contents)
        if content not in contents:
            contents.insert(0, content)
        begin = at
        at = max(reply.rfind("\\boxed", 0, at), reply.rfind("\\fbox", 0, at))
    return ", ".join(contents)


def _box(text: str, at: int) -> tuple[str, int]:
    """Return the content of a box, without that of boxes around it, and its end; "" if it has none."""
    match = _BOX.match(text, at)
    if match is None or match[2]:
        return (match[2], match.end()) if match else ("", at)
    depth = 1
    for end in range(match.end(), min(len(text), match.end() + CHARACTERS)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[match.end() : end].strip(), end + 1
    return "", len(text)


def _unmarked(tail: str) -> Statement | None:
    tail = _CALCULATOR.sub("", _MATH_BLOCK.sub(lambda m: m[0].replace("\n", " "), tail))
    stated = list(_STATED.finditer(tail))
    if stated and (found := _stated(tail[stated[-1].end() :])) is not None:
        return found
    return _last(tail)


def _stated(text: str) -> Statement | None:
    """Return the statement that a text begins with, up to the end of the sentence or of the clause; None if it is prose."""
    sentence = _sentences(text.lstrip(" \n\t*_:")[:CHARACTERS])[0].strip()
    sentence = _RESTATED.split(sentence)[-1]
    if (match := _NOT_BUT.fullmatch(sentence)) is not None:
        sentence = match[1]
    elif _MODIFIED.match(sentence):
        return Words(sentence.lower())
    ends = [len(sentence), *reversed([match.start() for match in _CLAUSE.finditer(sentence)])]
    for end in ends:
        found = read(sentence[:end])
        if found is not None and _is_answer(found, STATED_WORDS if end == len(sentence) else CUT_WORDS):
            return found
    return None


def _is_answer(found: Statement, words: int) -> bool:
    """Return whether a statement is no prose: at most `words` words, and in a list one each."""
    if isinstance(found, Items) and found.opening != "choice":
        return len({isinstance(one, Words) for one in found.entries}) == 1 and all(_is_answer(one, 1) for one in found.entries)
    return not isinstance(found, Words) or found.count <= words


def _sentences(text: str) -> list[str]:
    """Split a text into sentences and lines."""
    ends = [match.end() for match in _SENTENCE.finditer(text)]
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def _last(tail: str) -> Statement | None:
    """Return the last complete number phrase, or the whole text if it is a statement."""
    if (len(tail.split()) <= STATED_WORDS or _SPAN.fullmatch(tail.strip())) and (found := read(tail)) is not None:
        return found
    for sentence in reversed(_sentences(_BULLET.sub("", tail))):
        if re.fullmatch(r"\s*\([^()]*[a-z]{3}[^()]*\)\s*", sentence):  # a remark
            continue
        spans = _SPAN.sub(lambda m: re.sub(r"\s+", _GLUE, m[0].strip()), sentence)
        for phrase in reversed(list(_phrases(spans.split()))):
            found = next(filter(None, (read(text.replace(_GLUE, " ")) for text in phrase)), None)
            if found is None and any(map(str.isdigit, phrase[0])):
                return None
            if found is not None and not (is_name(found) or (isinstance(found, Words) and not any(map(str.isdigit, phrase[0])))):
                return found
    return None


def _phrases(tokens: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield the longest runs of tokens that state something, numbers and mathematics with what joins them.

    Each comes with the word that follows, which may be a unit, and without it.
    """
    i = 0
    while i < len(tokens):
        if not _is_math(tokens, i):
            i += 1
            continue
        begin = i
        i += 1
        while i < len(tokens):
            step = 1 if _is_math(tokens, i) or _OPERATOR.fullmatch(tokens[i]) else 0
            if not step and tokens[i].lower() in _JOINS and i + 1 < len(tokens) and _is_math(tokens, i + 1):
                step = 2
            elif (
                not step
                and i + 2 < len(tokens)
                and _UNIT_WORD.fullmatch(tokens[i])
                and tokens[i + 1] in ("and", "or")
                and _is_math(tokens, i + 2)
            ):  # "4 apples and 5 pears"
                step = 3
            if not step:
                break
            i += step
        if begin and (tokens[begin - 1].lower() in ("either", "between", "not") or _MONTH.fullmatch(tokens[begin - 1])):
            begin -= 1
        run = " ".join(tokens[begin:i])
        follows = (
            i < len(tokens)
            and _UNIT_WORD.fullmatch(tokens[i])
            and is_unit_word(tokens[i])
            and not run.endswith((",", ".", ";", ":"))
        )
        yield (f"{run} {tokens[i]}", run) if follows else (run,)


def _is_math(tokens: list[str], i: int) -> bool:
    """Return whether a token is a number or mathematics: a letter counts only beside a sign."""
    token = tokens[i]
    if _STARTS.match(token) or "$" in token or _GLUE in token or token.startswith(("\\(", "\\[")):
        return True
    beside = [tokens[k] for k in (i - 1, i + 1) if 0 <= k < len(tokens)]
    if _OPERATOR.fullmatch(token):
        return i + 1 < len(tokens) and _STARTS.match(tokens[i + 1]) is not None
    if re.match(r"-?[a-zA-Z](?:\([^()]*\))?[-+*/^=<>]|\([a-zA-Z0-9+*/^-]+\)|[a-zA-Z]\([a-zA-Z0-9]+\)", token):
        return any(character.isdigit() for character in token) or any(map(_OPERATOR.fullmatch, beside)) or "=" in token
    return _VARIABLE.fullmatch(token) is not None and any(map(_OPERATOR.fullmatch, beside))
