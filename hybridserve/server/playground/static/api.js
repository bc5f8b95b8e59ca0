// Talks to the server. Knows paths, the key and server-sent events; knows nothing of the page.

const KEY = "hybridserve.key";

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server can't be reached");
  }
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new ApiError(body?.error?.message ?? `the server answered ${response.status}`, response.status);
  }
  return response;
}

export const state = async () => (await call("/playground/state", { signal: AbortSignal.timeout(5000) })).json();
export const models = async () => (await (await call("/v1/models")).json()).data;

/** The events of a streamed answer, all that came together at a time. `body` goes to the path of its kind. */
export async function* stream(path, body, signal) {
  const response = await call(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({
      ...body,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ApiError("the answer was cut short");
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      const data = blocks.filter((block) => block.startsWith("data: ")).map((block) => block.slice(6));
      const isLast = data.at(-1) === "[DONE]";
      const events = (isLast ? data.slice(0, -1) : data).map((text) => JSON.parse(text));
      const failed = events.find((event) => event.error);
      yield events.filter((event) => !event.error);
      if (failed) throw new ApiError(failed.error.message);
      if (isLast) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
