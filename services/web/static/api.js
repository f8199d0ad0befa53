// Asking the server. An error is an Error with its status and the `detail` of the problem it answered with (RFC 9457).
import { useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { store, useStore } from "./state.js";

const KEPT = "grpo-token";

const readToken = () => {
  try {
    return sessionStorage.getItem(KEPT) || "";
  } catch {
    return "";
  }
};

// The token that was given, for as long as this tab is open; `operates` once the server has said that it may operate.
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
    // not of ours, e.g. a proxy's page
  }
  return new Problem(answer.status, detail || `the server answered ${answer.status} ${answer.statusText}`);
}

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", ...options, headers: withToken(options.headers) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "the server does not answer");
  }
  if (!answer.ok) throw await problemOf(answer);
  return answer.status === 204 ? null : answer.json();
}

export const read = (path, signal) => ask(path, { signal });

export const act = (path, body) =>
  ask(path, { method: "POST", body: JSON.stringify(body ?? {}), headers: { "Content-Type": "application/json" } });

// Take a token that the server knows; whether it may operate, or only read. Throws the server's refusal.
export async function unlock(token) {
  const before = session.get();
  session.set({ token, operates: false });
  let operates = false;
  try {
    const { scope } = await read("v1/console/scope");
    if (!scope) throw new Problem(401, "the server does not know this token");
    operates = scope === "operate";
  } catch (error) {
    session.set(before);
    throw error;
  }
  try {
    sessionStorage.setItem(KEPT, token);
  } catch {
    // storage is switched off: kept in memory, until the page is loaded again
  }
  session.set({ token, operates });
  return operates;
}

export function lock() {
  try {
    sessionStorage.removeItem(KEPT);
  } catch {
    // there was none
  }
  session.set({ token: "", operates: false });
}

// The answer to a GET as {data, error}, asked again every so many seconds while the page is looked at, and when `again` changes.
// An error leaves the last answer to the same question in place.
export function useAnswer(path, every_s = 0, again = null) {
  const [answer, set] = useState({ path, data: null, error: null });
  const { token } = useStore(session);
  const asking = useRef(null);
  useEffect(() => {
    if (!path) return undefined;
    const load = async () => {
      asking.current?.abort();
      const aborter = (asking.current = new AbortController());
      try {
        const data = await read(path, aborter.signal);
        set({ path, data, error: null });
      } catch (error) {
        if (error.name !== "AbortError") set((last) => ({ path, data: last.path === path ? last.data : null, error }));
      }
    };
    load();
    const timer = every_s ? setInterval(() => document.hidden || load(), every_s * 1000) : 0;
    return () => {
      clearInterval(timer);
      asking.current?.abort();
    };
  }, [path, every_s, token, again]);
  return answer.path === path ? answer : { data: null, error: null };
}
