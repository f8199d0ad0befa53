// The actions of an operator. Each calls an endpoint that other services have too, and needs a token with scope operate.
import { act, lock, session, unlock } from "./api.js";
import { askFor, perform } from "./dialog.js";
import { html } from "./vendor/htm-preact.js";
import { useStore } from "./state.js";

const ROLES = ["generator", "dataprep", "trainer"];
const WHY = { name: "why", label: "Reason", help: "Recorded with the run and visible to others.", most: 200 };
const because = (why) => ({ who: "web console", why });

const named = (roles) => (roles.length === ROLES.length ? "all roles" : roles.join(", "));

export const pause = () =>
  askFor({
    title: "Pause the run",
    text: "No work is lost. Pods that start while the run is paused are paused too.",
    fields: [
      { name: "role", label: "Services", value: "all", options: [["all", "all roles"], ...ROLES.map((role) => [role, role])] },
      WHY,
    ],
    submit: "Pause",
    run: async ({ role, why }) => {
      const roles = role === "all" ? ROLES : [role];
      for (const each of roles) await act(`v1/pause?role=${each}`, because(why));
      return `Paused: ${named(roles)}.`;
    },
  });

// All roles, not those that this page has heard of: another may have been paused since its last frame.
export const resume = () =>
  perform(async () => {
    for (const role of ROLES) await act(`v1/resume?role=${role}`, because(""));
    return `Resumed: ${named(ROLES)}.`;
  });

export const scale = (there, most) =>
  askFor({
    title: "Number of generators",
    text: "New generators join the next weight sync. Surplus generators finish their work or hand it back, and exit.",
    fields: [
      {
        name: "replicas", label: "Generators", kind: "number", min: 0, value: String(there), required: true,
        help: `0: the run waits until there is one.${most === null ? "" : ` The run's machine allows up to ${most}.`}`,
      },
      WHY,
    ],
    submit: "Scale",
    run: async ({ replicas, why }) => {
      const set = await act("v1/fleet/generators", { replicas: Number(replicas), ...because(why) });
      return `Desired generators set to ${set.replicas}.`;
    },
  });

export const checkpoint = () =>
  perform(async () => {
    const asked = await act("v1/checkpoint", because(""));
    return asked.saved ? `The checkpoint of step ${asked.step} has already been written.` : `Checkpoint requested for step ${asked.step}, or for the step in training.`;
  });

export const restore = (step) =>
  askFor({
    title: `Restore the checkpoint of step ${step}`,
    text: `Steps after ${step} are trained again, on the same prompts in the same order. The trainer restarts.`,
    fields: [WHY],
    submit: `Restore step ${step}`,
    danger: true,
    run: async ({ why }) => {
      await act(`v1/restore?step=${step}`, because(why));
      return `Restore to step ${step} requested.`;
    },
  });

export const stop = () =>
  askFor({
    title: "End the run permanently",
    text: "The trainer finishes its step, saves and ends the run. To resume later, press Ctrl-C in grpo run instead.",
    fields: [WHY],
    submit: "End the run",
    danger: true,
    run: async ({ why }) => {
      await act("v1/run/stop", because(why));
      return "The run ends after the current step.";
    },
  });

const outcome = (found) => {
  const first = found.refused[0];
  const left = found.refused.length ? ` ${found.refused.length} refused: ${first.why_not}` : "";
  return `${found.requeued.length} requeued.${left}`;
};

export const requeue = (id, done) =>
  perform(async () => {
    const found = await act("v1/deadletters/requeue", { ids: [id] });
    done();
    return outcome(found);
  });

export const requeueAll = (total, done) =>
  askFor({
    title: "Requeue all dead letters",
    text: `The tickets of ${total} dead letters are issued again. Letters whose ticket never counted as failed stay.`,
    submit: "Requeue all",
    run: async () => {
      const found = await act("v1/deadletters/requeue", { all: true });
      done();
      return outcome(found);
    },
  });

export const askForToken = () =>
  askFor({
    title: "Operate this run",
    text: "The controls need the run's token. This tab keeps it until it is closed.",
    fields: [{ name: "token", label: "Token", kind: "password", required: true, help: "It is in the file api-token in the run's folder. A link that grpo web prints logs in without it." }],
    submit: "Unlock",
    run: async ({ token }) => {
      const operates = await unlock(token.trim());
      return operates ? "Unlocked: this tab can operate the run." : "This token is read-only.";
    },
  });

export const lockAgain = () => {
  lock();
  return perform(async () => "Locked: the token was deleted from this tab.");
};

// Shows its children only if the token may operate.
export function Operator({ children }) {
  return useStore(session).operates ? children : null;
}

export const Action = ({ onClick, kind = "", disabled = false, children }) =>
  html`<button type="button" class=${kind} disabled=${disabled} onClick=${onClick}>${children}</button>`;
