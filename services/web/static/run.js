// Describes what a run is doing.
import { plain } from "./format.js";

export const pausedRoles = (state) => Object.keys(state?.paused ?? {}).sort();

// The state of the run as {kind, word, why}; kind: good | warn | bad | calm.
export function mood(live) {
  const { link, frame } = live;
  if (link === "denied") return { kind: "warn", word: "locked", why: live.why };
  if (!frame) return { kind: "calm", word: link === "lost" ? "disconnected" : "connecting", why: live.why };
  if (link === "lost") return { kind: "bad", word: "disconnected", why: live.why };
  const { state } = frame;
  if (link === "ended") return { kind: "calm", word: "console stopped", why: state?.finished || "" };
  if (frame.fault) return { kind: "bad", word: "no Redis", why: frame.fault };
  if (!state) return { kind: "calm", word: "not started", why: "dataprep has not created the run yet" };
  if (state.restore >= 0 || state.restoring >= 0) {
    const step = state.restoring >= 0 ? state.restoring : state.restore;
    return { kind: "warn", word: "restoring", why: `to the checkpoint of step ${step}` };
  }
  if (state.finished) return { kind: "good", word: "finished", why: state.finished };
  if (state.stopping) return { kind: "warn", word: "stopping", why: state.stopping };
  const paused = pausedRoles(state);
  if (paused.length) return { kind: "warn", word: "paused", why: paused.map((role) => `${role}: ${plain(state.paused[role])}`).join("; ") };
  return { kind: "good", word: "running", why: "" };
}

export const trainedSteps = (state) => (state ? state.committed_step + 1 : 0);

export const generators = (frame) => {
  const of = frame.fleet.phases.filter((group) => group.kind === "generator");
  const sum = (groups) => groups.reduce((total, group) => total + group.pods, 0);
  return { there: sum(of), atWork: sum(of.filter((group) => group.phase === "ready" || group.phase === "evaluating")) };
};

// "v12", or "none" before the first weights.
export const version = (value) => (value < 0 ? "none" : `v${value}`);
