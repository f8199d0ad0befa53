// What an operator can do from the page. Each is an endpoint that other services have too; all need a token that may operate.
import { act, lock, session, unlock } from "./api.js";
import { askFor, perform } from "./dialog.js";
import { html } from "./vendor/htm-preact.js";
import { useStore } from "./state.js";

const ROLES = ["generator", "dataprep", "trainer"];
const MODES = [["keep", "stays where it is"], ["drain", "comes to its end"], ["abort", "is handed back"]];
const WHY = { name: "why", label: "Why", help: "Kept with the run; others see it.", most: 200 };
const because = (why) => why || "web console";

const named = (roles) => (roles.length === ROLES.length ? "all roles" : roles.join(", "));

export const pause = () =>
  askFor({
    title: "Pause the run",
    text: "Work that is under way is kept. Pods that start meanwhile stay paused too.",
    fields: [
      { name: "role", label: "Who", value: "all", options: [["all", "all roles"], ...ROLES.map((role) => [role, role])] },
      { name: "mode", label: "What generators have under way", value: "keep", options: MODES },
      WHY,
    ],
    submit: "Pause",
    run: async ({ role, mode, why }) => {
      const roles = role === "all" ? ROLES : [role];
      for (const each of roles) await act(`v1/pause?role=${each}`, { why: because(why), mode: each === "generator" ? mode : "keep" });
      return `Paused: ${named(roles)}.`;
    },
  });

export const resume = (roles) =>
  perform(async () => {
    for (const role of roles) await act(`v1/resume?role=${encodeURIComponent(role)}`);
    return `May go on: ${named(roles)}.`;
  });

export const scale = (there, most) =>
  askFor({
    title: "Number of generators",
    text: "New ones join the next weight sync. The last ones finish what they do, or hand it back, and end.",
    fields: [
      {
        name: "replicas", label: "Generators", kind: "number", min: 0, value: String(there), required: true,
        help: `0: the run waits until there are some again.${most === null ? "" : ` There is room for ${most}.`}`,
      },
      WHY,
    ],
    submit: "Scale",
    run: async ({ replicas, why }) => {
      const wish = await act("v1/fleet/generators", { replicas: Number(replicas), why: because(why) });
      return `${wish.replicas} generators are wanted from now on.`;
    },
  });

export const checkpoint = () =>
  perform(async () => {
    const asked = await act("v1/checkpoint", { why: "web console" });
    return asked.saved ? `The checkpoint of step ${asked.step} is written already.` : `A checkpoint of step ${asked.step}, or the one being trained, will be written.`;
  });

export const restore = (step) =>
  askFor({
    title: `Go back to the checkpoint of step ${step}`,
    text: `Steps after ${step} are trained anew, with the same prompts in the same order. The trainer starts again for it.`,
    submit: `Go back to step ${step}`,
    danger: true,
    run: async () => {
      await act(`v1/restore?step=${step}`);
      return `The run goes back to step ${step}.`;
    },
  });

export const stop = () =>
  askFor({
    title: "End the run for good",
    text: "The trainer finishes its step, saves and ends the run. To go on later, press Ctrl-C in grpo run instead.",
    fields: [WHY],
    submit: "End the run",
    danger: true,
    run: async ({ why }) => {
      await act("v1/run/stop", { why: because(why) });
      return "The run ends when its step is trained.";
    },
  });

const outcome = (found) => {
  const first = found.refused[0];
  const left = found.refused.length ? ` ${found.refused.length} stay${found.refused.length === 1 ? "s" : ""}: ${first.why_not}` : "";
  return `${found.requeued.length} put back.${left}`;
};

export const requeue = (id, done) =>
  perform(async () => {
    const found = await act("v1/deadletters/requeue", { ids: [id] });
    done();
    return outcome(found);
  });

export const requeueAll = (total, done) =>
  askFor({
    title: "Put all dead letters back",
    text: `The tickets of ${total} dead letters are issued again. Those that never counted as failed stay.`,
    submit: "Put all back",
    run: async () => {
      const found = await act("v1/deadletters/requeue", { all: true });
      done();
      return outcome(found);
    },
  });

export const askForToken = () =>
  askFor({
    title: "Operate this run",
    text: "Buttons need the run's token. It is kept in this tab until it is closed.",
    fields: [{ name: "token", label: "Token", kind: "password", required: true, help: "grpo run leaves it in api-token of the run's folder." }],
    submit: "Unlock",
    run: async ({ token }) => {
      const operates = await unlock(token.trim());
      return operates ? "Unlocked: this tab may operate the run." : "This token may read, not operate the run.";
    },
  });

export const lockAgain = () => {
  lock();
  return perform(async () => "Locked: the token is forgotten.");
};

// Its children only where the token may operate.
export function Operator({ children }) {
  return useStore(session).operates ? children : null;
}

export const Action = ({ onClick, kind = "", disabled = false, children }) =>
  html`<button type="button" class=${kind} disabled=${disabled} onClick=${onClick}>${children}</button>`;
