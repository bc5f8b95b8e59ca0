// The view of the engine: asks how it stands about once a second while somebody can see the page.

import * as api from "./api.js";
import * as arena from "./arena.js";
import { Chart } from "./charts.js";
import { bytes, duration, find, make, setText, short } from "./dom.js";
import { askForKey } from "./settings.js";

const PERIOD = 1000; // milliseconds
const MAX_ROWS = 6;
const WORDS = {
  ok: "ready",
  starting: "loading the model",
  draining: "shutting down",
  dead: "the engine has failed",
};

let charts;
let last = null; // the numbers before
let timer = 0;
let known = ""; // the names of models that the page shows
let hasAskedForKey = false;
let onModels = () => {};

function setStatus(state, text) {
  const status = find("status");
  status.dataset.state = state;
  setText(status, text);
}

async function look() {
  clearTimeout(timer);
  let wait = PERIOD;
  try {
    const state = await api.state();
    setStatus(state.status === "ok" ? "good" : "wait", `${state.model} · ${WORDS[state.status] ?? state.status}`);
    if (state.engine) show(state.engine);
    if (state.status === "ok") await nameModels(state);
  } catch (error) {
    setStatus("bad", error.status === 401 ? "needs an API key" : error.message);
    known = "";
    wait = 3 * PERIOD;
    if (error.status === 401 && !hasAskedForKey) {
      hasAskedForKey = true;
      askForKey();
    }
  }
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(look, wait);
}

async function nameModels(state) {
  const names = JSON.stringify([state.model, ...state.engine.adapters.map((adapter) => adapter.name)]);
  if (names === known) return;
  onModels(await api.models());
  known = names;
}

/** What changed since the numbers before; null at first, and after a new start of the server. */
function change(numbers, name) {
  const grown = last && numbers[name] - last[name];
  return grown === null || grown < 0 ? null : grown;
}

function mean(numbers, name) {
  if (!last || numbers[name].count <= last[name].count) return null;
  return (numbers[name].seconds - last[name].seconds) / (numbers[name].count - last[name].count);
}

function show(numbers) {
  if (last?.seconds === numbers.seconds) return; // a step takes long: the same numbers again
  if (last && numbers.num_steps < last.num_steps) last = null;
  const seconds = last ? numbers.seconds - last.seconds : 0;
  const rate = (name) => (seconds ? change(numbers, name) / seconds : null);
  const generated = rate("num_generated_tokens");
  const computed = rate("num_computed_tokens");
  const first = mean(numbers, "first_token");
  const between = mean(numbers, "between_tokens");

  setText(find("rate"), generated === null ? "–" : short(Math.round(generated)));
  setText(find("running"), String(numbers.num_running));
  setText(find("waiting"), String(numbers.num_waiting));
  const usable = numbers.arena.num_usable_bytes;
  const sizes = numbers.arena.bytes_by_kind;
  setText(find("used"), usable ? percent((sizes.kv_live + sizes.state_live) / usable) : "–");

  arena.show(numbers.arena, bytes);
  arena.showShares(sizes, bytes);
  const queried = numbers.num_queried_tokens;
  setText(find("hits"), queried ? `${percent(numbers.num_hit_tokens / queried)} of prompts were there` : "");
  charts.tokens.add(numbers.seconds, [generated, computed]);
  charts.first.add(numbers.seconds, [first]);
  charts.between.add(numbers.seconds, [between]);
  if (first !== null) setText(find("first-now"), duration(first));
  if (between !== null) setText(find("between-now"), duration(between));
  showRequests(numbers);
  showAdapters(numbers.adapters);
  last = numbers;
}

const percent = (share) => (share > 0 && share < 0.001 ? "<0.1%" : `${short(share * 100)}%`);

function showRequests({ requests, num_running, num_waiting }) {
  const rows = requests.slice(0, MAX_ROWS).map((request) => {
    const row = make("li", request.is_running ? "request" : "request waits");
    const isReading = request.num_generated === 0;
    const bar = make("progress");
    bar.max = isReading ? request.num_prompt : request.max_tokens;
    bar.value = isReading ? request.num_computed : request.num_generated;
    bar.setAttribute("aria-hidden", "true");
    bar.className = isReading ? "reads" : "";
    const doing = isReading ? `read ${request.num_computed}/${request.num_prompt}` : `${request.num_generated}/${request.max_tokens}`;
    row.append(
      make("span", "name", request.adapter ?? "base"),
      bar,
      make("span", "number", request.is_running ? doing : "waits"),
      make("span", "number", duration(request.seconds)),
    );
    return row;
  });
  const more = num_running + num_waiting - rows.length;
  find("requests").replaceChildren(...(rows.length ? rows : [make("li", "none", "None: the engine rests.")]));
  setText(find("requests-more"), more > 0 ? `and ${more} more` : "");
}

function showAdapters(adapters) {
  const rows = adapters.slice(0, MAX_ROWS).map((adapter) => {
    const row = make("li", "adapter");
    const where = make("span", "where", adapter.state);
    where.dataset.state = adapter.state;
    const busy = adapter.num_running + adapter.num_waiting;
    row.append(
      make("span", "name", adapter.name),
      where,
      make("span", "number", `rank ${adapter.rank}`),
      make("span", "number", busy ? `${busy} active` : `${short(adapter.num_generated_tokens)} tokens`),
    );
    return row;
  });
  find("adapters").replaceChildren(...(rows.length ? rows : [make("li", "none", "None: the base model alone.")]));
  setText(find("adapters-more"), adapters.length > rows.length ? `and ${adapters.length - rows.length} more` : "");
}

/** Ask again now: the key has changed. */
export function refresh() {
  known = "";
  look();
}

export function start(takeModels) {
  onModels = takeModels;
  charts = {
    tokens: new Chart(find("tokens-chart"), ["--ink", "--edge"], "Tokens generated and computed a second, in the last two minutes", short),
    first: new Chart(find("first-chart"), ["--ink"], "Time to the first token, in the last two minutes", duration, true),
    between: new Chart(find("between-chart"), ["--ink"], "Time between tokens, in the last two minutes", duration),
  };
  arena.start();
  document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : look()));
  look();
}
