"use strict";
/* Draws a unit as keras_preact/analysis/figures/diagrams.py does: x_l at the top, the shortcut on
   the left, F on the right, then the addition, f and x_{l+1}. */

function element(name, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return node;
}

function picture(width, height, label) {
  return element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
}

/* Return a unit in words, path by path. */
function inWords(unit) {
  const texts = (boxes) => boxes.map(([text]) => text).join(", ") || "nothing";
  const gate = unit.gate.length ? ` Gate: ${texts(unit.gate)}.` : "";
  const shortcut = unit.connected ? texts(unit.shortcut) : "there is none";
  return `F: ${texts(unit.branch)}. On the shortcut: ${shortcut}.${gate} After the addition: ${texts(unit.after_addition)}.`;
}

function drawUnit(unit) {
  const box = { width: 100, height: 29 }, step = 41, left = 62;
  const longest = Math.max(unit.branch.length, unit.gate.length + unit.shortcut.length);
  const right = left + (unit.gate.length ? 226 : unit.shortcut.length ? 128 : 112);
  const top = 26, fork = top + 17, end = top + step * longest + 4, addition = end + step;
  const height = addition + step * unit.after_addition.length + 64;
  const svg = picture(right + 62, height, inWords(unit));

  const wire = (points, extra = "") =>
    svg.append(element("polyline", { class: `wire ${extra}`, points: points.join(" ") }));
  const arrow = (x, y, angle) =>
    svg.append(element("path", { class: "arrow", d: "M0 0 l-9 -4.5 v9 z", transform: `translate(${x} ${y}) rotate(${angle})` }));
  const symbol = (base, index, y) => {
    const text = element("text", { class: "symbol", x: left, y, "text-anchor": "middle", "font-size": 17 }, base);
    text.append(element("tspan", { dy: 4, "font-size": 12 }, index));
    svg.append(text);
  };
  const drawBox = ([text, colour], x, y) => {
    const [shown, index] = text.replace("* ", "\u00d7 ").split("_");
    const size = Math.min(14.5, 128 / text.length);
    svg.append(element("rect", { class: "box", x: x - box.width / 2, y: y - box.height / 2, width: box.width, height: box.height, rx: 6, style: `fill: var(--${colour})` }));
    const label = element("text", { x, y: y + size * 0.36, "text-anchor": "middle", "font-size": size }, shown);
    if (index) label.append(element("tspan", { dy: 4, "font-size": size * 0.75 }, index));
    svg.append(label);
  };

  symbol("x", "l", 16);
  if (unit.connected) {
    wire([left, top, left, addition - 20], "shortcut");
    arrow(left, addition - 13, 90);
    wire([left, fork, right, fork, right, addition, left + 20, addition]);
    arrow(left + 13, addition, 180);
    svg.append(element("circle", { class: "wire", cx: left, cy: addition, r: 12 }));
    svg.append(element("text", { x: left, y: addition + 6, "text-anchor": "middle", "font-size": 18 }, "+"));
  } else {
    wire([left, top, left, fork, right, fork, right, addition, left, addition, left, addition + 12]);
  }
  unit.branch.forEach((each, i) => drawBox(each, right, top + step * (i + 1)));
  const last = top + step * longest;
  [...unit.shortcut].reverse().forEach((each, i) => drawBox(each, left, last - step * i));
  if (unit.gate.length) {
    const middle = (left + right) / 2;
    wire([middle, fork, middle, last, left + box.width / 2 + 6, last]);
    [...unit.gate].reverse().forEach((each, i) => drawBox(each, middle, last - step * (i + unit.shortcut.length)));
    arrow(left + box.width / 2, last, 180);
    if (unit.branch.at(-1)[1] === "other") {
      const y = top + step * unit.branch.length;
      wire([middle, y, right - box.width / 2 - 6, y]);
      arrow(right - box.width / 2, y, 0);
    }
  }
  let y = addition, below = 12;
  for (const each of unit.after_addition) {
    wire([left, y + below, left, y + step]);
    y += step;
    below = box.height / 2;
    drawBox(each, left, y);
  }
  wire([left, y + below, left, y + 34]);
  arrow(left, y + 41, 90);
  symbol("x", "l+1", y + 57);
  return svg;
}
