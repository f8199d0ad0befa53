// Evaluation rounds on held-out prompts, each with a single policy version.
import { useAnswer } from "../api.js";
import { keysOf, named, Passes } from "../charts/passes.js";
import { count, duration, fixed, percent, plain } from "../format.js";
import { Ago, Answer, Badge, Empty, Facts, Meter, Page, Panel, Table } from "../parts.js";
import { version } from "../run.js";
import { html } from "../vendor/htm-preact.js";
import { waiting } from "./waiting.js";

const MOST = 100;
const ALL = "all";

function Open({ evaluation, every }) {
  const { round, abandoned, dealt_with: dealtWith } = evaluation;
  if (!every) return html`<${Panel} title="Now"><${Empty}>This run has no evaluation: evaluation.every_steps is 0.<//><//>`;
  return html`<${Panel} title="Now">
    <${Facts}
      of=${[
        round && ["Evaluating", html`${version(round.version)} <${Badge} kind=${round.fault ? "bad" : "good"}>${round.fault ? "cannot be completed" : round.started ? "running" : "waiting for a generator"}<//>`],
        round && ["Prompts", html`${count(round.done)} of ${count(round.total)} <${Meter} value=${round.done} of=${round.total} label="Prompts completed" />`],
        round && ["Generators", count(round.volunteers)],
        round && ["Elapsed", duration(round.wall_s)],
        round?.fault && ["Fault", html`<span class="bad-text">${plain(round.fault)}</span>`],
        !round && ["Open round", "none"],
        ["Schedule", `every ${count(every)} steps, and after the last`],
        ["Last version handled", version(dealtWith)],
        abandoned && ["Last abandoned", html`<span class="warn-text">${plain(abandoned)}</span>`],
      ]}
    />
  <//>`;
}

function Rounds({ rounds }) {
  const keys = keysOf(rounds);
  const columns = [
    { head: "Version", num: true, cell: (round) => version(round["eval/version"]) },
    ...keys.map((key) => ({ head: named(key), num: true, cell: (round) => fixed(round[key], 3) })),
    { head: "Reward", num: true, cell: (round) => fixed(round[`eval/${ALL}/reward`], 3) },
    { head: "Length", num: true, title: "mean tokens", cell: (round) => fixed(round[`eval/${ALL}/length`], 1) },
    { head: "Truncated", num: true, cell: (round) => percent(round[`eval/${ALL}/truncated`], 1) },
    { head: "Took", num: true, cell: (round) => duration(round["eval/wall_s"]) },
    { head: "When", num: true, cell: (round) => html`<${Ago} at=${round.time_s} />` },
  ];
  return html`${rounds.length > 0 && html`<div class="charts one"><${Passes} rounds=${rounds} /></div>`}
    <${Panel} title="Completed rounds" note=${rounds.length === MOST ? `the last ${MOST}` : ""}>
      <${Table} label="Completed rounds" columns=${columns} rows=${rounds} rowKey=${(round) => round["eval/version"]} empty="No round has been completed yet." />
    <//>`;
}

export function EvaluationPage({ frame, about }) {
  const answer = useAnswer(`v1/console/evaluations?limit=${MOST}`, 0, frame ? `${frame.rounds.revision}/${frame.rounds.count}` : null);
  const unready = waiting("Evaluation", frame);
  if (unready) return unready;
  return html`<${Page} title="Evaluation" lead="Held-out prompts, evaluated during training. Each round uses a single policy version.">
    ${frame.evaluation && html`<${Open} evaluation=${frame.evaluation} every=${about?.facts["evaluation.every_steps"]} />`}
    <${Answer} of=${answer}>${(data) => html`<${Rounds} rounds=${data.rounds} />`}<//>
  <//>`;
}
