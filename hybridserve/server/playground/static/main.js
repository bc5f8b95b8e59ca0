// Puts the page together.

import * as chat from "./chat.js";
import { make } from "./dom.js";
import * as engine from "./engine.js";
import * as settings from "./settings.js";

// On a narrow screen one of the two is seen at a time.
const views = document.querySelectorAll(".views button");
for (const button of views) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.view;
    for (const each of views) each.setAttribute("aria-pressed", String(each === button));
  });
}

function explain(element, parts) {
  element.replaceChildren(...parts.map(([kind, text]) => {
    const part = make("span", "", text);
    part.dataset.kind = kind;
    return part;
  }));
}

explain(document.getElementById("tokens-now"), [["generated", "generated"], ["computed", "computed"]]);
chat.start();
settings.start(engine.refresh);
engine.start(chat.setModels);
