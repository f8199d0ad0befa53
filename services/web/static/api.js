// Requests to the server. A failed request throws a Problem with the status and the `detail` of the response (RFC 9457).
import { useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { store, useStore } from "./state.js";

const KEPT = "grpo-token";
const RETRY_S = 5; // after an error that may pass
const UNKNOWN =
  "This is not a token of this run. Open a link that grpo web prints, or use a token from the run's folder: api-token to control the run, api-read-token to view it. A run that was started over has new tokens.";

const readToken = () => {
  try {
    return sessionStorage.getItem(KEPT) || "";
  } catch {
    return "";
  }
};

// The token, kept while this tab is open; `operates`: the server has confirmed that it may operate.
export const session = store({ token: readToken(), operates: false });

export const withToken = (headers = {}) => {
  const { token } = session.get();
  return token ? { ...headers, Authorization: `Bearer ${token}` } : headers;
};

export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export async function problemOf(answer) {
  let detail = "";
  try {
    detail = (await answer.json()).detail;
  } catch {
    // not one of our responses, e.g. a proxy's page
  }
  return new Problem(answer.status, detail || `the server returned ${answer.status} ${answer.statusText}`);
}

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", ...options, headers: withToken(options.headers) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "the server does not respond");
  }
  if (!answer.ok) throw await problemOf(answer);
  return answer.status === 204 ? null : answer.json();
}

export const read = (path, signal) => ask(path, { signal });

export const act = (path, body) =>
  ask(path, { method: "POST", body: JSON.stringify(body ?? {}), headers: { "Content-Type": "application/json" } });

// Adopt a token if the server knows it. Returns whether it may operate, or only read; throws the server's refusal.
export async function unlock(token) {
  const before = session.get();
  session.set({ token, operates: false });
  let operates = false;
  try {
    const { scope } = await read("v1/console/scope");
    if (!scope) throw new Problem(401, UNKNOWN);
    operates = scope === "operate";
  } catch (error) {
    session.set(before);
    throw error.status === 401 ? new Problem(401, UNKNOWN) : error;
  }
  try {
    sessionStorage.setItem(KEPT, token);
  } catch {
    // storage is disabled: kept in memory until the page is reloaded
  }
  session.set({ token, operates });
  return operates;
}

export function lock() {
  try {
    sessionStorage.removeItem(KEPT);
  } catch {
    // storage is disabled
  }
  session.set({ token: "", operates: false });
}

// The response to a GET as {data, error}. It is repeated every `every_s` seconds while the page is visible, and when `again`
// changes; a request that takes longer than that is not cut short. An error keeps the last response from the same path, and is
// repeated if it may pass: the server or Redis was away.
export function useAnswer(path, every_s = 0, again = null) {
  const [answer, set] = useState({ path, data: null, error: null });
  const { token } = useStore(session);
  const repeat = useRef(() => {});
  const seen = useRef(again);
  useEffect(() => {
    if (!path) return undefined;
    const aborter = new AbortController();
    let asking = false;
    let outdated = false; // something changed since the request under way
    let retry = 0;
    const soon = () => {
      retry = setTimeout(() => (document.hidden ? soon() : load()), RETRY_S * 1000);
    };
    const load = async () => {
      outdated = asking;
      if (asking) return;
      asking = true;
      clearTimeout(retry);
      try {
        const data = await read(path, aborter.signal);
        set({ path, data, error: null });
      } catch (error) {
        if (error.name === "AbortError") return;
        set((last) => ({ path, data: last.path === path ? last.data : null, error }));
        if (!every_s && !(error.status >= 400 && error.status < 500)) soon();
      }
      asking = false;
      if (outdated) load();
    };
    repeat.current = load;
    load();
    const timer = every_s ? setInterval(() => document.hidden || asking || load(), every_s * 1000) : 0;
    return () => {
      clearInterval(timer);
      clearTimeout(retry);
      aborter.abort();
      repeat.current = () => {};
    };
  }, [path, every_s, token]);
  useEffect(() => {
    if (seen.current !== again) repeat.current();
    seen.current = again;
  }, [again]);
  return answer.path === path ? answer : { data: null, error: null };
}
