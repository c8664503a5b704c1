// Questions to the server. A newer question lets go of the one before it, whose answer is null.

const GONE = "The server does not answer. Is zerobubble explore still running?";

export class Asker {
  // Lets go of the question, whose answer is null.
  drop() {
    if (this.before) this.before.abort();
  }

  async ask(path, values) {
    this.drop();
    const mine = new AbortController();
    this.before = mine;
    try {
      const response = await send(path, values, mine.signal);
      return await response.json();
    } catch (error) {
      return mine.signal.aborted ? null : { error: GONE, field: "" };
    }
  }
}

export function send(path, values, signal) {
  return fetch(`api/${path}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(values), signal });
}

// The text of an answer, or the sentence why there is none as an error.
export async function askForText(path, values) {
  const response = await send(path, values).catch(() => null);
  if (!response) throw new Error(GONE);
  if (!response.ok) throw new Error((await response.json()).error);
  return response.text();
}
