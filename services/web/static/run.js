// Describes what a run is doing.
const KINDS = { running: "good", paused: "warn", stopped: "calm", finished: "good", failed: "bad" };

export const pausedRoles = (state) => Object.keys(state?.paused ?? {}).sort();

// What the run is doing, or why that is not known, as {kind, word, why}; kind: good | warn | bad | calm.
export function mood(live) {
  const { link, frame } = live;
  if (link === "denied") return { kind: "warn", word: "locked", why: live.why };
  if (!frame) return { kind: "calm", word: link === "lost" ? "disconnected" : "connecting", why: live.why };
  if (link === "lost") return { kind: "bad", word: "disconnected", why: live.why };
  if (link === "ended") return { kind: "calm", word: "console stopped", why: frame.state?.finished || "" };
  if (frame.fault) return { kind: "bad", word: "no Redis", why: frame.fault };
  const { word, detail } = frame.condition;
  return { kind: KINDS[word], word, why: detail };
}

// A condition in words: "failed: trainer-0 exited with code 1".
export const told = ({ word, detail }) => `${word}${detail && `: ${detail}`}`;

export const trainedSteps = (state) => (state ? state.committed_step + 1 : 0);

// The desired number of generators; undefined if it is not known, or set by an autoscaler or `kubectl`.
export const desired = ({ state }, about) =>
  about?.facts["fleet.scaling"] === "request" ? (state.scale.wanted ?? about.facts["generator.count"]) : undefined;

export const generators = (frame) => {
  const of = frame.fleet.phases.filter((group) => group.kind === "generator");
  const sum = (groups) => groups.reduce((total, group) => total + group.pods, 0);
  return { there: sum(of), atWork: sum(of.filter((group) => group.phase === "ready" || group.phase === "evaluating")) };
};

// "v12", or "none" before the first weights.
export const version = (value) => (value < 0 ? "none" : `v${value}`);
