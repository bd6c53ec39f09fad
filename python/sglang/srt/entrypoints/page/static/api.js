/* Calls of the server. Paths are relative to the page, so that a proxy may put all of it below a prefix. */

const KEY = "sglang.api-key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let askForKey = null;
let pendingKey = null;

/** `ask(rejected)` resolves to a key. It is called once for any number of calls that wait for it. */
export function onUnauthorized(ask) {
  askForKey = ask;
}

async function newKey(usedKey) {
  const current = sessionStorage.getItem(KEY);
  if (current !== usedKey) return; // another call has asked meanwhile
  pendingKey ??= askForKey(usedKey !== null).then((key) => {
    sessionStorage.setItem(KEY, key);
    pendingKey = null;
  });
  await pendingKey;
}

/** The response, once the server has accepted it. Throws ApiError; status 0: nobody answered. */
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, {
        method: body === undefined ? "GET" : "POST",
        headers,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The server does not answer.");
    }
    if (response.status === 401) {
      await newKey(key);
      continue;
    }
    if (!response.ok) throw new ApiError(response.status, await messageOf(response));
    return response;
  }
}

export const getJson = async (path) => (await request(path)).json();

/** The value of a JSON text; undefined if it is none. */
export function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

async function messageOf(response) {
  const text = await response.text();
  const body = parsed(text);
  return body?.message ?? body?.error?.message ?? (text || `The server answered with status ${response.status}.`);
}

/** The data of each server-sent event of `response`. */
export async function* eventData(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
