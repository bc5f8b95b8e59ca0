// The sampling controls: from the form to the fields of a request. An empty control leaves its field out.

import { key } from "./api.js";
import { find } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const details = find("settings");
const form = find("composer");
const keyField = find("key");

const field = (name) => form.elements[name];

/** The fields of a request; null, with the control shown that is wrong, where they make no sense. */
export function read() {
  const wrong = NUMBERS.map(field).find((input) => !input.checkValidity());
  if (wrong) {
    details.open = true;
    wrong.reportValidity();
    return null;
  }
  const sampling = {};
  for (const name of NUMBERS) if (field(name).value !== "") sampling[name] = Number(field(name).value);
  const stop = field("stop").value.split("\n").filter((line) => line !== "");
  if (stop.length) sampling.stop = stop;
  return { sampling, system: field("system").value.trim(), isPlain: field("format").value === "plain" };
}

function showGist() {
  const parts = NUMBERS.filter((name) => field(name).value !== "").map((name) => `${name} ${field(name).value}`);
  if (field("stop").value.trim()) parts.push("stop");
  if (field("system").value.trim()) parts.push("system prompt");
  if (field("format").value === "plain") parts.push("plain text");
  find("gist").textContent = parts.join(" · ");
}

/** Show where the key goes. */
export function askForKey() {
  details.open = true;
  if (document.activeElement === document.body) keyField.focus();
}

export function start(onKey) {
  keyField.value = key.get();
  keyField.addEventListener("input", () => {
    key.set(keyField.value.trim());
    onKey();
  });
  details.addEventListener("input", showGist);
  // Enter in a control is no wish to send what stands in the prompt.
  details.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.tagName === "INPUT") event.preventDefault();
  });
  showGist();
}
