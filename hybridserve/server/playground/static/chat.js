// The conversation: prompts, and beside each other the answers of one model or two.

import * as api from "./api.js";
import { duration, find, make } from "./dom.js";
import * as settings from "./settings.js";

const turnsBox = find("turns");
const prompt = find("prompt");
const send = find("send");
const selects = [find("model-a"), find("model-b")];

const turns = []; // { prompt, answers: [Answer, ...] }
let running = null; // of the answers that are coming: what aborts them

const isComparing = () => find("compare").getAttribute("aria-pressed") === "true";

class Answer {
  constructor(model) {
    this.model = model;
    this.text = "";
    this.numTokens = 0;
    this.element = make("section", "answer");
    this.element.append(make("h3", "", model));
    this.words = document.createTextNode("");
    this.box = make("div", "text coming");
    this.box.append(this.words);
    this.facts = make("p", "facts", "waiting");
    this.element.append(this.box, this.facts);
    this.element.setAttribute("aria-busy", "true");
  }

  async run(path, body, signal) {
    this.begin = performance.now();
    let ending = "";
    try {
      for await (const events of api.stream(path, { ...body, model: this.model || null }, signal)) {
        ending = this.take(events) || ending;
        keepInView();
      }
    } catch (error) {
      ending = error.name === "AbortError" ? "stopped" : "failed";
      if (ending === "failed") this.element.insertBefore(make("p", "error", error.message), this.facts);
    }
    this.end(ending);
  }

  /** Returns the reason to finish, once there is one. */
  take(events) {
    let ending = "";
    let added = "";
    for (const event of events) {
      const [choice] = event.choices;
      added += choice?.delta?.content ?? choice?.text ?? "";
      ending = choice?.finish_reason ?? ending;
      this.numTokens = event.usage?.completion_tokens ?? this.numTokens;
    }
    if (this.numTokens && !this.first) this.first = { time: performance.now(), count: this.numTokens };
    if (added) {
      this.text += added;
      this.words.appendData(added);
    }
    this.last = performance.now();
    this.showFacts(ending);
    return ending;
  }

  showFacts(ending = "") {
    const parts = [];
    if (this.first) parts.push(`first token ${duration((this.first.time - this.begin) / 1000)}`);
    const seconds = (this.last - this.first?.time) / 1000;
    const count = this.numTokens - this.first?.count;
    if (count > 0 && seconds > 0) parts.push(`${(count / seconds).toFixed(1)} tok/s`);
    if (this.numTokens) parts.push(`${this.numTokens} ${this.numTokens === 1 ? "token" : "tokens"}`);
    if (ending) parts.push(ending);
    this.facts.replaceChildren(...parts.map((part) => make("span", "", part)));
  }

  end(ending) {
    this.box.classList.remove("coming");
    this.element.removeAttribute("aria-busy");
    this.showFacts(ending);
    this.summary = `${this.model}: ${this.numTokens} tokens, ${ending}`;
  }
}

/** What a model is told: its own part of the conversation, where it took part. */
function messages(system, column) {
  const told = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    const answer = turn.answers[column] ?? turn.answers[0];
    if (answer?.text) {
      told.push({ role: "user", content: turn.prompt }, { role: "assistant", content: answer.text });
    }
  }
  return told;
}

function request(text, column, { sampling, system, isPlain }) {
  if (isPlain) return ["/v1/completions", { ...sampling, prompt: text }];
  return ["/v1/chat/completions", { ...sampling, messages: [...messages(system, column), { role: "user", content: text }] }];
}

async function ask() {
  const text = prompt.value;
  const chosen = settings.read();
  if (running || !chosen || !text.trim()) return;
  const models = (isComparing() ? selects : selects.slice(0, 1)).map((select) => select.value);
  const requests = models.map((_, column) => request(text, column, chosen));
  const turn = { prompt: text, answers: models.map((model) => new Answer(model)) };
  turns.push(turn);
  show(turn);
  prompt.value = "";
  fit();
  running = new AbortController();
  setRunning(true);
  const signal = running.signal;
  await Promise.all(turn.answers.map((answer, column) => answer.run(...requests[column], signal)));
  if (running?.signal === signal) {
    running = null;
    setRunning(false);
    find("announcer").textContent = turn.answers.map((answer) => answer.summary).join("; ");
  }
}

function show(turn) {
  find("opening").hidden = true;
  const article = make("article", "turn");
  const answers = make("div", `answers of-${turn.answers.length}`);
  answers.append(...turn.answers.map((answer) => answer.element));
  article.append(make("p", "prompt", turn.prompt), answers);
  turnsBox.append(article);
  turnsBox.scrollTop = turnsBox.scrollHeight;
}

export function stop() {
  running?.abort();
}

function startAnew() {
  stop();
  running = null;
  setRunning(false);
  turns.length = 0;
  for (const article of turnsBox.querySelectorAll(".turn")) article.remove();
  find("opening").hidden = false;
  find("announcer").textContent = "A new conversation";
  prompt.focus();
}

function setRunning(isRunning) {
  send.textContent = isRunning ? "Stop" : "Send";
  send.classList.toggle("stops", isRunning);
}

/** Follow the text as it comes, unless the reader has scrolled away from its end. */
function keepInView() {
  const rest = turnsBox.scrollHeight - turnsBox.scrollTop - turnsBox.clientHeight;
  if (rest < 120) turnsBox.scrollTop = turnsBox.scrollHeight;
}

/** As high as the prompt. */
function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

/** `cards` are those of /v1/models: the base, then its adapters. What was chosen stays chosen. */
export function setModels(cards) {
  const ids = cards.map((card) => card.id);
  selects.forEach((select, column) => {
    const chosen = ids.includes(select.value) ? select.value : (ids[column] ?? ids[0]);
    select.replaceChildren(...cards.map((card) => {
      const option = make("option", "", card.id);
      option.value = card.id;
      return option;
    }));
    select.value = chosen;
  });
}

export function start() {
  find("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) stop();
    else ask();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      ask();
    }
  });
  prompt.addEventListener("input", fit);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) {
      event.preventDefault();
      stop();
    }
  });
  find("compare").addEventListener("click", () => {
    const pressed = !isComparing();
    find("compare").setAttribute("aria-pressed", String(pressed));
    find("beside").hidden = !pressed;
    find("beside").parentElement.classList.toggle("two", pressed);
  });
  find("new").addEventListener("click", startAnew);
  if (matchMedia("(hover: hover)").matches) prompt.focus(); // else a keyboard would cover the page
}
