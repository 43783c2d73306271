"use strict";
/* The choice is in the fragment of the address: #ARRANGEMENT/SHORTCUT/DEPTH. The page shows what
   choices.js and measured.js hold for it. */

const find = (id) => document.getElementById(id);
const OPTIONS = { arrangement: CHOICES.arrangements, shortcut: CHOICES.shortcuts, depth: Object.fromEntries(Object.keys(CHOICES.depths).map((depth) => [depth, Number(depth).toLocaleString("en")])) };

/* Return the choice in the fragment: what it lacks or has wrong is that of the first choice. */
function chosen() {
  const given = decodeURIComponent(location.hash.slice(1)).split("/");
  const first = CHOICES.first.split("/");
  return Object.fromEntries(Object.keys(OPTIONS).map((name, i) => [name, given[i] in OPTIONS[name] ? given[i] : first[i]]));
}

function addOptions() {
  for (const [name, options] of Object.entries(OPTIONS)) {
    Object.entries(options).forEach(([value, words], i) => {
      if (name === "shortcut" && i === CHOICES.of_the_paper) {
        find(name).append(Object.assign(document.createElement("p"), { className: "later", textContent: "after 2016" }));
      }
      const label = document.createElement("label");
      label.append(Object.assign(document.createElement("input"), { type: "radio", name, value }), words);
      find(name).append(label);
    });
  }
  find("choice").addEventListener("change", () => {
    const values = new FormData(find("choice"));
    location.hash = Object.keys(OPTIONS).map((name) => values.get(name)).join("/");
  });
}

/* Return the values of a line of a network, or undefined. */
function valuesOf(network, name, points) {
  const found = network?.[name];
  return Array.isArray(found) || found === undefined ? found : points.map(() => found);
}

function replaceIn(id, node) {
  find(id).querySelector("svg, .missing")?.remove();
  find(id).append(node);
}

function missing(words) {
  return Object.assign(document.createElement("p"), { className: "missing note", textContent: words });
}

/* The lines of both charts, without those that are not measured. */
function linesOf({ arrangement, shortcut, depth }, points) {
  const network = MEASURED[`${arrangement}/${shortcut}/${depth}`];
  const isReference = `${arrangement}/${shortcut}` === CHOICES.reference;
  const reference = isReference ? undefined : MEASURED[`${CHOICES.reference}/${depth}`];
  const line = (source, name, label, colour, dashed = false) => ({ values: valuesOf(source, name, points), label, colour, dashed });
  const h = network && "backward" in network ? "h alone, signal" : "h alone";
  const same = JSON.stringify(network?.path) === JSON.stringify(network?.forward);
  const gain = [
    line(same ? undefined : network, "forward", h, "forward"),
    line(network, "backward", "h alone, gradient", "backward", true),
    line(network, "path", same ? "h, and h with f" : "h and f, gradient", "path"),
  ];
  const gradient = [line(reference, "gradient", "full pre-activation, identity", "grey", true), line(network, "gradient", "this network", "gradient")];
  return [gain, gradient].map((lines) => lines.filter(({ values }) => values?.some((value) => value !== null)));
}

function drawCharts(choice) {
  const { points, starts, units } = CHOICES.depths[choice.depth];
  const network = MEASURED[`${choice.arrangement}/${choice.shortcut}/${choice.depth}`];
  const [gain, gradient] = linesOf(choice, points);
  const axes = { gain: { low: -4, high: 1, step: 1 }, gradient: { low: -4, high: 6, step: 2 } };
  const titles = { gain: "Part of the signal or the gradient that passes the shortcuts up to the end of the stage", gradient: "Norm of the gradient at each unit" };
  for (const [id, lines] of Object.entries({ gain, gradient })) {
    const ends = lines.map(({ label, values }) => `${label}: ${written(values[0])} at unit 0, ${written(values.at(-1))} at unit ${units}`);
    const why = network?.refused ?? (!network ? "Not computed for this depth." : network.gradient === null ? "The numbers leave the range of float32." : "Nothing passes.");
    const label = `${titles[id]}, logarithmic. ${ends.join(". ")}. All numbers are in the table below.`;
    replaceIn(id, lines.length ? drawChart({ label, width: find(id).clientWidth, ...axes[id], points, starts, lines }) : missing(why));
  }
  const columns = [...gain, ...gradient];
  const heads = ["l", ...columns.map(({ label }) => label)];
  fill("numbers", heads, points.map((l, i) => [String(l), ...columns.map(({ values }) => written(values[i]))]));
  find("about").textContent = `A network of ${Number(choice.depth).toLocaleString("en")} layers in ${units} units (${CHOICES.depths[choice.depth].block}) before training, with a quarter of the channels, on 16 digits. Each line of the upper chart starts again at 1 after a change of shape: it goes from x_l to the last x of its stage. "h alone" is the product of the shortcuts, for a signal and for a gradient. "h and f" is the gradient that comes back through shortcuts and f, without the branches. A dash is a number that is not finite, or a part of nothing. ${CHOICES.notes[choice.shortcut] ?? ""}`;
}

function fill(id, heads, rows) {
  const table = find(id);
  table.replaceChildren();
  const head = table.createTHead().insertRow();
  for (const words of heads) head.append(Object.assign(document.createElement("th"), { scope: "col", textContent: words }));
  const body = table.createTBody();
  for (const cells of rows) {
    const row = body.insertRow();
    for (const words of cells) row.insertCell().textContent = words;
  }
}

function showErrors({ arrangement, shortcut, depth }) {
  const lines = CHOICES.errors[`${arrangement}/${shortcut}`] ?? [];
  const [here, others] = [true, false].map((same) => lines.filter((line) => (String(line[0]) === depth) === same));
  const name = (layers) => `ResNet-${layers}`;
  const row = ([layers, trained, published, ours, runs]) => [`${name(layers)}, ${trained}`, published || "not published", ours || "not measured", runs ? String(runs) : ""];
  const first = here.length ? here.map(row) : [[name(depth), "not published", "not measured", ""]];
  const heads = ["network", "published", "here", "n"];
  fill("table", heads, first);
  fill("others", heads, others.map(row));
  find("of-others").hidden = !others.length;
}

function show() {
  const choice = chosen();
  const key = Object.values(choice).join("/");
  for (const [name, value] of Object.entries(choice)) {
    find("choice").querySelector(`input[name="${name}"][value="${value}"]`).checked = true;
  }
  const refused = MEASURED[key]?.refused;
  const words = refused ? `Refused: ${refused}` : CHOICES.sentences[CHOICES.said[key]];
  const [, verdict, rest] = words.match(/^([^:]*:)(.*)$/s) ?? [null, "", words];
  find("sentence").replaceChildren(Object.assign(document.createElement("b"), { textContent: verdict }), rest);
  const unit = CHOICES.diagrams[`${choice.arrangement}/${choice.shortcut}/${CHOICES.depths[choice.depth].block}`];
  const title = `${CHOICES.arrangements[choice.arrangement]}, ${CHOICES.shortcuts[choice.shortcut]}`;
  find("diagram").querySelector("figcaption").textContent = title;
  replaceIn("diagram", drawUnit(unit));
  document.title = `${title}, ${choice.depth} layers - unit explorer`;
  drawCharts(choice);
  showErrors(choice);
  const lines = CHOICES.code[`${choice.shortcut}/${choice.depth}`];
  find("python").textContent = ["import keras_preact as kp", "", `unit = ${lines.unit}`, `model = ${lines.network}`].join("\n").replaceAll("ARRANGEMENT", choice.arrangement);
  find("copied").textContent = "";
  const refusal = CHOICES.refusals[choice.shortcut];
  find("refusal").textContent = refusal ? `By its name, a unit alone refuses this shortcut: ${refusal}` : "";
}

/* The colours of choices.js for light and dark pages. */
function addColours() {
  const rules = ["light", "dark"].map((scheme, i) => {
    const colours = Object.entries(CHOICES.colours).map(([name, both]) => `--${name}: ${both[i]};`);
    return `:root[data-scheme="${scheme}"] { color-scheme: ${scheme}; ${colours.join(" ")} }`;
  });
  document.head.append(Object.assign(document.createElement("style"), { textContent: rules.join("\n") }));
}

/* Return the scheme that a person chose on the pages around this one, or "". Their theme keeps it in
   the browser, below the address of the documentation. */
function schemeOfSite() {
  try {
    const key = new URL("..", location.href).pathname + ".__palette";
    const scheme = JSON.parse(localStorage.getItem(key))?.color?.scheme;
    return { slate: "dark", default: "light" }[scheme] ?? "";
  } catch {
    return ""; // no storage
  }
}

function addScheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let own = schemeOfSite();
  const apply = () => {
    const scheme = own || (dark.matches ? "dark" : "light");
    document.documentElement.dataset.scheme = scheme;
    find("scheme").textContent = scheme === "dark" ? "Light" : "Dark";
  };
  dark.addEventListener("change", apply);
  find("scheme").addEventListener("click", () => {
    own = document.documentElement.dataset.scheme === "dark" ? "light" : "dark";
    apply();
  });
  apply();
}

async function copy() {
  try {
    await navigator.clipboard.writeText(find("python").textContent);
    find("copied").textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren(find("python"));
    find("copied").textContent = "Selected: press Ctrl+C.";
  }
}

addColours();
addScheme();
addOptions();
find("copy").addEventListener("click", copy);
addEventListener("hashchange", show);
addEventListener("resize", () => drawCharts(chosen()));
// in a clone, unlike on the site, the pages around this one are Markdown
if (location.pathname.includes("/docs/explorer/")) for (const link of document.querySelectorAll("[data-file]")) link.href = link.dataset.file;
show();
