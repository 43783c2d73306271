// The server's API, with its errors in plain words.

const ANSWER_WITHIN = 60_000; // milliseconds

const WORDS = {
  400: "This file could not be read as an image.",
  401: "The server asks for a token.",
  404: "The server no longer has this model.",
  408: "The image took too long to arrive at the server.",
  413: "This file is larger than the server takes.",
  429: "The server is busy.",
  503: "The model cannot answer at the moment.",
};

let token = ""; // only in this variable: it is lost when the page is closed

/** Keep a token for later requests. Return whether a header can carry it. */
export function useToken(text) {
  const possible = /^[\x21-\x7e]+$/.test(text);
  token = possible ? text : "";
  return possible;
}

/** A failure in a sentence for people; `detail` holds the server's own words, `again` whether another try may help. */
export class Problem extends Error {
  constructor(message, { status = 0, detail = "", again = true } = {}) {
    super(message);
    Object.assign(this, { status, detail, again });
  }
}

async function ask(path, body) {
  const headers = body ? { "Content-Type": "application/json" } : {};
  if (token) headers.Authorization = `Bearer ${token}`;
  const signal = AbortSignal.timeout(ANSWER_WITHIN);
  let response, text;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body, signal, cache: "no-store" });
    text = await response.text();
  } catch {
    throw new Problem(signal.aborted ? "The server took more than a minute to answer." : "The server does not answer. Is it still running?");
  }
  let answer = null;
  try {
    answer = JSON.parse(text);
  } catch {
    // not the server answered but something in between, such as a proxy; below it is a failure like any other
  }
  if (response.ok && answer !== null) return answer;
  throw refusal(response, answer);
}

function refusal(response, answer) {
  const { status } = response;
  const seconds = Math.ceil(Number(response.headers.get("Retry-After")));
  const when = seconds > 0 ? ` Try again in ${seconds === 1 ? "a second" : `${seconds} seconds`}.` : "";
  const sentence = WORDS[status] ?? `The server failed to answer (status ${status}).`;
  const detail = typeof answer?.error === "string" ? answer.error : "";
  return new Problem(sentence + when, { status, detail, again: status !== 400 && status !== 413 });
}

/** Return the server's models: [{name, versions: [{version, state, classes, input: {shape}, takes_images}]}]. */
export async function models() {
  return (await ask("v1/models")).models;
}

/** Return [[class, score], ...] of an image file, highest first. */
export async function classify(model, file) {
  const image = await base64(file);
  const path = `v1/models/${encodeURIComponent(model.name)}/versions/${model.version}:classify`;
  return (await ask(path, JSON.stringify({ examples: [{ image_bytes: { b64: image } }] }))).results[0];
}

function base64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(new Problem("This file could not be opened.", { again: false }));
    reader.readAsDataURL(file);
  });
}
