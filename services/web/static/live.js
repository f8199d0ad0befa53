// The state of the run, once a second: server-sent events, read with fetch so that the request can carry the token.
import { problemOf, session, withToken } from "./api.js";
import { store } from "./state.js";

const FIRST_PAUSE_S = 1;
const LONGEST_PAUSE_S = 10;
const SILENCE_S = 15; // a request or stream without a frame for this long is ended and repeated

// `link`: connecting | open | lost | ended | denied. `opened`: streams so far; the run may have been resumed, or be another, since
// the one before. `frame`: the last one. `retry_at`: time of the next attempt, Unix seconds.
export const live = store({ link: "connecting", opened: 0, frame: null, retry_at: 0, why: "" });

const say = (changes) => live.set({ ...live.get(), ...changes });

// Seconds by which the server's clock is ahead of this one.
export const skew = () => live.get().skew || 0;

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const lines = text.slice(0, end).split("\n");
      text = text.slice(end + 2);
      const field = (name) => lines.find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
      yield { name: field("event"), data: field("data") };
    }
  }
}

// A browser opens at most six connections to a server, so a hidden page closes its own.
const looked = () =>
  new Promise((done) => {
    const see = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", see);
      done();
    };
    document.addEventListener("visibilitychange", see);
    see();
  });

async function follow(aborter) {
  const hide = () => document.hidden && aborter.abort();
  document.addEventListener("visibilitychange", hide, { signal: aborter.signal });
  let watchdog = setTimeout(() => aborter.abort(), SILENCE_S * 1000);
  try {
    const answer = await fetch("v1/console/live", { headers: withToken(), cache: "no-store", signal: aborter.signal });
    if (!answer.ok) throw await problemOf(answer);
    say({ opened: live.get().opened + 1 });
    for await (const { name, data } of events(answer)) {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => aborter.abort(), SILENCE_S * 1000);
      const frame = JSON.parse(data);
      say({ link: name === "bye" ? "ended" : "open", frame, skew: frame.at - Date.now() / 1000, retry_at: 0, why: "" });
      if (name === "frame") pause_s = FIRST_PAUSE_S;
    }
  } finally {
    clearTimeout(watchdog);
    document.removeEventListener("visibilitychange", hide);
  }
}

let pause_s = FIRST_PAUSE_S;
let wake = () => {};

export const retryNow = () => wake();

export async function keepFollowing() {
  session.listen(() => wake());
  for (;;) {
    await looked();
    try {
      await follow(new AbortController());
      say({ link: live.get().link === "ended" ? "ended" : "lost", why: "the server closed the connection" });
    } catch (error) {
      if (document.hidden) continue;
      const denied = error.status === 401 || error.status === 403;
      const link = denied ? "denied" : live.get().link === "ended" ? "ended" : "lost";
      say({ link, why: error.status ? error.message : "the server does not respond" });
    }
    say({ retry_at: Date.now() / 1000 + pause_s });
    await new Promise((done) => {
      wake = done;
      setTimeout(done, pause_s * 1000);
    });
    pause_s = Math.min(2 * pause_s, LONGEST_PAUSE_S);
  }
}
