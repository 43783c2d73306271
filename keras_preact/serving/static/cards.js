// The cards: one per image, with its preview and the answer. Every text is set as text, never as HTML.

const TINY = 96; // pixels; images up to this size are enlarged with sharp pixels, not blurred

const list = document.getElementById("cards");
const answers = document.getElementById("answers");

export const percent = (score) => (score > 0 && score < 0.0005 ? "< 0.1\u00a0%" : `${(100 * score).toFixed(1)}\u00a0%`);

const duration = (ms) => (ms < 1000 ? `${Math.max(1, Math.round(ms))}\u00a0ms` : `${(ms / 1000).toFixed(1)}\u00a0s`);

const copy = (id) => document.getElementById(id).content.firstElementChild.cloneNode(true);

/** A card for an image file; `again(card)` is called when the person asks for another try. */
export class Card {
  constructor(file, again) {
    this.file = file;
    this.name = file.name || "Pasted image";
    this.node = copy("card");
    this.find = (selector) => this.node.querySelector(selector);
    this.find("h3").textContent = this.name;
    this.find("button").addEventListener("click", () => again(this));
    this.url = URL.createObjectURL(file);
    const image = this.find("img");
    image.addEventListener("load", () => image.classList.toggle("tiny", Math.max(image.naturalWidth, image.naturalHeight) <= TINY));
    image.addEventListener("error", () => this.find(".preview").classList.add("none"));
    image.src = this.url;
  }

  get shown() {
    return this.node.isConnected;
  }

  set(state, meta) {
    this.node.dataset.state = state;
    this.find(".meta").textContent = meta;
    this.find("ol").hidden = state !== "answered";
    this.find(".problem").hidden = state !== "failed";
  }

  waits() {
    this.set("waiting", "Waiting");
  }

  asks(model) {
    this.set("asking", `Asking ${model.name}\u2026`);
  }

  answer(model, results, ms) {
    this.set("answered", `${model.name}, version ${model.version} \u00b7 ${duration(ms)}`);
    this.find("ol").replaceChildren(
      ...results.map(([name, score]) => {
        const row = copy("row");
        row.querySelector(".name").textContent = name;
        row.querySelector(".score").textContent = percent(score);
        row.querySelector(".bar").style.width = `${100 * score}%`;
        return row;
      }),
    );
  }

  fail(problem) {
    this.set("failed", "");
    this.find(".what").textContent = problem.message;
    this.find(".detail").textContent = problem.detail;
    this.find("button").hidden = !problem.again;
  }
}

/** Show new cards above the earlier ones. */
export function show(cards) {
  list.prepend(...cards.map((card) => card.node));
  answers.hidden = false;
}

export function clear(cards) {
  for (const card of cards) URL.revokeObjectURL(card.url);
  list.replaceChildren();
  answers.hidden = true;
}
