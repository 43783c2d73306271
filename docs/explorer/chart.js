"use strict";
/* Draws lines by depth on a fixed logarithmic axis. Values outside it are marked at its edge. */

/* Return a number with 3 digits, such as 0.5, 1663 or 3.8e-6. */
function written(value) {
  if (value === null || value === undefined) return "-";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const short = Number(value.toPrecision(3));
  return size >= 1e-3 && size < 1e5 ? String(short) : short.toExponential().replace("+", "");
}

const RAISED = { "-": "\u207b", 0: "\u2070", 1: "\u00b9", 2: "\u00b2", 3: "\u00b3", 4: "\u2074", 5: "\u2075", 6: "\u2076", 7: "\u2077", 8: "\u2078", 9: "\u2079" };

/* Return a power of ten for an axis. */
function power(exponent) {
  if (exponent === 0) return "1";
  return "10" + [...String(exponent)].map((digit) => RAISED[digit]).join("");
}

/* Arguments: label is the text of the picture, width its width in pixels. low and high are the exponents at the ends of the
   axis, step those between its marks. points are the l of the values, starts the l at which a
   stage starts. lines are objects: label, colour, values, and whether the line is dashed. */
function drawChart({ label, width, low, high, step, points, starts, lines }) {
  const height = 186, frame = { left: 40, right: 14, top: 18, bottom: 30 };
  const bottom = height - frame.bottom, end = width - frame.right, last = points.at(-1);
  const x = (l) => frame.left + ((end - frame.left) * l) / last;
  const y = (exponent) => bottom - ((bottom - frame.top) * (exponent - low)) / (high - low);
  const svg = picture(width, height, label);
  const text = (content, attributes) => svg.append(element("text", { class: "tick", ...attributes }, content));

  for (let exponent = low; exponent <= high; exponent += step) {
    svg.append(element("line", { class: exponent === 0 ? "mark" : "grid", x1: frame.left, x2: end, y1: y(exponent), y2: y(exponent) }));
    text(power(exponent), { x: frame.left - 7, y: y(exponent) + 4, "text-anchor": "end" });
  }
  // the first units of a bottleneck network make a stage of their own, of one x
  const stages = starts.filter((start, i) => (starts[i + 1] ?? last) - start > 1);
  stages.forEach((start, i) => {
    if (i) svg.append(element("line", { class: "mark", x1: x(start - 0.5), x2: x(start - 0.5), y1: frame.top, y2: bottom }));
    text(`stage ${i + 1}`, { x: x(start) + 3, y: frame.top - 7 });
    text(String(start), { x: x(start), y: bottom + 14, "text-anchor": "middle" });
  });
  svg.append(element("line", { class: "axis", x1: frame.left, x2: end, y1: bottom, y2: bottom }));
  text(String(last), { x: end, y: bottom + 14, "text-anchor": "middle" });
  text("unit l", { x: (frame.left + end) / 2, y: bottom + 26, "text-anchor": "middle" });

  const taken = [];
  const drawn = lines.map((line) => {
    const style = `stroke: var(--${line.colour})`, dots = [];
    let run = [];
    const finish = () => {
      if (run.length > 1) svg.append(element("polyline", { class: "series", style, points: run.flat().join(" "), "stroke-dasharray": line.dashed ? "5 4" : "none" }));
      else if (run.length) svg.append(element("circle", { cx: run[0][0], cy: run[0][1], r: 2.5, style: `fill: var(--${line.colour})` }));
      run = [];
    };
    let extreme = null;
    line.values.forEach((value, i) => {
      if (starts.includes(points[i])) finish();
      if (value === null) return finish();
      const exponent = value > 0 ? Math.log10(value) : -Infinity;
      const spot = [x(points[i]), y(Math.min(high, Math.max(low, exponent)))];
      run.push(spot);
      dots.push(spot);
      const beyond = Math.max(exponent - high, low - exponent);
      if (beyond > 0 && (extreme === null || beyond > extreme.beyond)) extreme = { beyond, spot, value, up: exponent > high };
    });
    finish();
    if (extreme) {
      const [at, edge] = extreme.spot, sign = extreme.up ? 1 : -1;
      svg.append(element("path", { d: `M${at} ${edge} l-5 ${8 * sign} h10 z`, style: `fill: var(--${line.colour})` }));
      const words = `to ${written(extreme.value)}`, spot = { x: Math.min(at + 9, end - 60), y: edge + (extreme.up ? 12 : -5) };
      text(words, { class: "tick beyond", ...spot });
      taken.push({ x: spot.x, y: spot.y - 11, width: 6.2 * words.length, height: 13 });
    }
    return { ...line, dots };
  });
  placeLabels(svg, drawn, taken, frame, end, bottom);
  return svg;
}

/* Write each line's label where it covers the fewest points of lines and other texts; `taken` has
   the boxes of those. */
function placeLabels(svg, lines, taken, frame, end, bottom) {
  const inside = (box, [x, y]) => x > box.x - 4 && x < box.x + box.width + 4 && y > box.y - 2 && y < box.y + box.height + 2;
  const dense = lines.flatMap(({ dots }) => dots.flatMap((dot, i) => {
    const next = dots[i + 1] ?? dot;
    return [0, 0.25, 0.5, 0.75].map((t) => [dot[0] + t * (next[0] - dot[0]), dot[1] + t * (next[1] - dot[1])]);
  }));
  for (const line of lines) {
    const width = 7.1 * line.label.length, height = 14;
    let best = null;
    for (const [x, y] of line.dots) {
      for (const [dy, penalty] of [[-20, 0], [7, 0], [-32, 1.5], [19, 1.5]]) {
        const box = { x: Math.min(Math.max(x - width / 2, frame.left + 4), end - width - 2), y: y + dy, width, height };
        const overlaps = taken.filter((other) => box.x < other.x + other.width + 8 && other.x < box.x + width + 8 && Math.abs(box.y - other.y) < height).length;
        const outside = box.y < frame.top || box.y + height > bottom ? 8 : 0;
        const cost = dense.filter((dot) => inside(box, dot)).length + 20 * overlaps + outside + penalty + Math.abs(x - (frame.left + end) / 2) / 500;
        if (best === null || cost < best.cost) best = { cost, box };
      }
    }
    if (best === null) continue;
    taken.push(best.box);
    svg.append(element("text", { class: "label", x: best.box.x, y: best.box.y + 11, style: `fill: var(--${line.colour})` }, line.label));
  }
}
