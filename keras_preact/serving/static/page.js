// The page: the model to ask, the images that wait, the messages to the user.

import { classify, models, Problem, useToken } from "./api.js";
import { Card, clear, percent, show } from "./cards.js";

const AT_ONCE = 3; // requests in flight
const LOOK_AGAIN = 3000; // milliseconds, while no model is ready

const byId = (id) => document.getElementById(id);
const drop = byId("drop");
const select = byId("model");

let choices = []; // what can be asked: {name, version, classes, shape}
let cards = [];
let waiting = [];
let asking = 0;
let timer;

function tell(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

// ---- the model

const chosen = () => choices[select.selectedIndex];

/** Read the server's list of models. If none of them can be asked, read it again later. */
async function refresh() {
  clearTimeout(timer);
  try {
    offer(await models());
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (error.status === 401) return askForToken();
    tell(`${error.message} ${error.detail}`.trim());
  }
  byId("token-form").hidden = true;
  if (!choices.length || !byId("notice").hidden) timer = setTimeout(refresh, LOOK_AGAIN);
}

function offer(all) {
  const before = chosen();
  choices = all.flatMap((model) =>
    model.versions
      .filter((version) => version.takes_images && version.state === "AVAILABLE")
      .map(({ version, classes, input }) => ({ name: model.name, version, classes, shape: input.shape }))
      .sort((a, b) => b.version - a.version),
  );
  const times = (name) => choices.filter((choice) => choice.name === name).length;
  select.replaceChildren(...choices.map(({ name, version }) => new Option(times(name) > 1 ? `${name}, version ${version}` : name)));
  const same = choices.findIndex((choice) => choice.name === before?.name && choice.version === before?.version);
  select.selectedIndex = same >= 0 ? same : Math.max(0, choices.findIndex((choice) => choice.name === before?.name));
  select.hidden = choices.length < 2;
  byId("model-row").hidden = !choices.length;
  describe();
  tell(choices.length ? "" : nothingToAsk(all));
}

function describe() {
  const model = chosen();
  if (!model) return;
  const [, height, width] = model.shape;
  const size = height && width ? ` \u00b7 sees ${width}\u00a0\u00d7\u00a0${height} pixels` : "";
  byId("only-model").textContent = model.name;
  byId("only-model").hidden = choices.length > 1;
  byId("about").textContent = `version ${model.version} \u00b7 ${model.classes} classes${size}`;
}

function nothingToAsk(all) {
  const ready = all.filter((model) => model.versions.some((version) => version.state === "AVAILABLE"));
  if (!ready.length) return "No model is ready yet. This page keeps looking.";
  const names = ready.map((model) => model.name).join(", ");
  return ready.length === 1 ? `The model here, ${names}, does not take images.` : `The models here, ${names}, do not take images.`;
}

// ---- the token

function askForToken(refused = "") {
  tell(refused);
  if (!byId("token-form").hidden && !refused) return;
  byId("token-form").hidden = false;
  byId("token").value = "";
  byId("token").focus();
}

byId("token-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const accepted = useToken(byId("token").value.trim());
  byId("token-form").hidden = true;
  if (accepted) await refresh();
  if (!accepted || !byId("token-form").hidden) return askForToken("The server did not accept this token.");
  add(cards.filter((card) => card.wantsToken));
});

// ---- the images

function take(files) {
  const images = [...files];
  if (!images.length) return;
  const added = images.map((file) => new Card(file, (card) => add([card])));
  cards.push(...added);
  show(added);
  add(added);
}

function add(some) {
  for (const card of some) card.waits();
  waiting.push(...some);
  next();
}

function next() {
  while (asking < AT_ONCE && waiting.length) {
    const card = waiting.shift();
    if (!card.shown) continue;
    asking += 1;
    run(card).finally(() => {
      asking -= 1;
      next();
    });
  }
}

async function run(card) {
  card.wantsToken = false;
  const start = performance.now();
  try {
    const model = chosen();
    if (!model) throw new Problem("No model is ready yet.");
    card.asks(model);
    const results = await classify(model, card.file);
    card.answer(model, results, performance.now() - start);
    if (card.shown) say(`${card.name}: ${results[0][0]}, ${percent(results[0][1])}`);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    card.fail(error);
    if (card.shown) say(`${card.name}: ${error.message}`);
    card.wantsToken = error.status === 401;
    if (card.wantsToken) askForToken();
    else if (error.status === 404 || (error.status === 0 && error.again)) refresh(); // another version replaced it, or the server is gone
  }
}

const say = (text) => (byId("said").textContent = text);

// ---- what the user does

byId("files").addEventListener("change", ({ target }) => {
  take(target.files);
  target.value = ""; // the same file may be chosen again
});
select.addEventListener("change", describe);
byId("clear").addEventListener("click", () => {
  clear(cards);
  cards = [];
  say("Cleared.");
  byId("files").focus();
});

document.addEventListener("paste", ({ clipboardData }) => take(clipboardData.files));
// The whole page accepts drops: outside the frame the browser would leave the page and open the file.
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  drop.classList.add("over");
});
document.addEventListener("dragleave", ({ relatedTarget }) => {
  if (!relatedTarget) drop.classList.remove("over");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  take(event.dataTransfer.files);
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh();
});

refresh();
