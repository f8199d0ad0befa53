// The difference of two texts, word by word. Pure.

export const MOST = 2000; // words of a text; a longer one is compared up to there
const FARTHEST = 1000; // words and spaces by which two texts may differ before they are called too different

// Words and the spaces between them, in turn.
const words = (text) => text.match(/\s+|[^\s]+/g) ?? [];

// {pieces, cut}: the pieces {text, kind}, kind "same", "gone" (only in `before`) or "new" (only in `after`), or null if the texts
// differ too much; and whether a text was longer than what was compared.
export function difference(before, after) {
  const [from, to] = [words(before), words(after)];
  const cut = Math.max(from.length, to.length) > 2 * MOST;
  return { pieces: compared(from.slice(0, 2 * MOST), to.slice(0, 2 * MOST)), cut };
}

// Myers' algorithm (1986): the shortest script of deletions and insertions, by the farthest-reaching path of each diagonal.
function compared(from, to) {
  const reach = new Map([[1, 0]]);
  const trace = [];
  for (let cost = 0; cost <= Math.min(FARTHEST, from.length + to.length); cost += 1) {
    trace.push(new Map(reach));
    for (let diagonal = -cost; diagonal <= cost; diagonal += 2) {
      const down = diagonal === -cost || (diagonal !== cost && reach.get(diagonal - 1) < reach.get(diagonal + 1));
      let x = down ? reach.get(diagonal + 1) : reach.get(diagonal - 1) + 1;
      while (x < from.length && x - diagonal < to.length && from[x] === to[x - diagonal]) x += 1;
      reach.set(diagonal, x);
      if (x >= from.length && x - diagonal >= to.length) return joined(script(from, to, trace));
    }
  }
  return null;
}

// The pieces in order, found from the end back through the paths.
function script(from, to, trace) {
  const pieces = [];
  let x = from.length;
  let y = to.length;
  for (let cost = trace.length - 1; cost >= 0; cost -= 1) {
    const reach = trace[cost];
    const diagonal = x - y;
    const down = diagonal === -cost || (diagonal !== cost && reach.get(diagonal - 1) < reach.get(diagonal + 1));
    const previous = down ? diagonal + 1 : diagonal - 1;
    const back = cost ? reach.get(previous) : 0;
    while (x > back && y > back - previous && x > 0 && y > 0 && from[x - 1] === to[y - 1]) {
      pieces.push({ text: from[x - 1], kind: "same" });
      x -= 1;
      y -= 1;
    }
    if (!cost) break;
    if (down) pieces.push({ text: to[(y -= 1)], kind: "new" });
    else pieces.push({ text: from[(x -= 1)], kind: "gone" });
  }
  return pieces.reverse();
}

// Neighbours of one kind become one piece.
function joined(pieces) {
  const found = [];
  for (const { text, kind } of pieces) {
    if (found.at(-1)?.kind === kind) found.at(-1).text += text;
    else found.push({ text, kind });
  }
  return found;
}
