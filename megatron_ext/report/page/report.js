"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const root = document.documentElement;

  // Light or dark, as the system says until the button is used.
  document.getElementById("theme").addEventListener("click", () => {
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
  });

  // A legend's button hides its line: in its own chart, or in all of them.
  for (const button of document.querySelectorAll("[data-toggle]")) {
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      const scope = button.closest(".chart") || document;
      for (const line of scope.querySelectorAll(".line")) {
        if (line.dataset.key === button.dataset.toggle) line.classList.toggle("off", !shown);
      }
    });
  }

  const unfold = document.getElementById("unfold");
  if (unfold) {
    unfold.addEventListener("click", () => {
      const all = [...document.querySelectorAll("#samples details")];
      const open = all.some((one) => !one.open);
      for (const one of all) one.open = open;
      unfold.textContent = open ? "fold all" : "unfold all";
    });
  }

  const show = (rows, x, y) => {
    tip.replaceChildren(...rows);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth ? x - box.width - 12 : x + 16;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - box.height - 4))}px`;
  };
  const row = (label, value, colour) => {
    const line = document.createElement("div");
    const said = document.createElement("span");
    if (colour !== undefined) {
      const swatch = document.createElement("i");
      swatch.className = `swatch c${colour}`;
      said.append(swatch);
    }
    said.append(label);
    const number = document.createElement("b");
    number.textContent = value;
    line.append(said, number);
    return line;
  };
  const readable = (v) => (v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6) ? v.toExponential(2) : String(+v.toPrecision(4)));
  const nearest = (steps, at) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= at) low = middle; else high = middle;
    }
    return Math.abs(steps[low] - at) <= Math.abs(steps[high] - at) ? low : high;
  };

  // The pointer over a chart reads every visible line at the nearest step.
  for (const chart of document.querySelectorAll(".chart")) {
    const svg = chart.querySelector(":scope > svg");
    const drawn = data[Number(chart.dataset.chart)];
    if (!svg || !drawn.lines) continue;
    const cursor = svg.querySelector(".cursor");
    const [low, high, start, end] = drawn.x;
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      const step = low + (at - start) / (end - start) * (high - low);
      const rows = [];
      let first;
      for (const line of drawn.lines) {
        const mark = svg.querySelector(`.line[data-key="${CSS.escape(line.key)}"]`);
        if (!line.steps.length || (mark && mark.classList.contains("off"))) continue;
        const index = nearest(line.steps, step);
        if (first === undefined) first = line.steps[index];
        rows.push(row(line.label, readable(line.values[index]), line.colour));
      }
      if (first === undefined) return;
      const x = start + (first - low) / (high - low) * (end - start);
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.setAttribute("visibility", "visible");
      show([row("step", String(Math.round(first))), ...rows], event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", () => {
      cursor.setAttribute("visibility", "hidden");
      tip.hidden = true;
    });
  }

  // The pointer over a map of experts reads the load back from the pixel's opacity and colour.
  for (const map of document.querySelectorAll(".map")) {
    const picture = map.querySelector("img");
    const steps = map.dataset.steps.split(","), reach = Number(map.dataset.reach);
    let pixels = null;
    picture.addEventListener("pointermove", (event) => {
      if (!pixels) {
        const canvas = document.createElement("canvas");
        canvas.width = picture.naturalWidth;
        canvas.height = picture.naturalHeight;
        const pen = canvas.getContext("2d");
        pen.drawImage(picture, 0, 0);
        pixels = pen.getImageData(0, 0, canvas.width, canvas.height);
      }
      const box = picture.getBoundingClientRect();
      const place = (at, from, size, count) => Math.max(0, Math.min(count - 1, Math.floor((at - from) / size * count)));
      const column = place(event.clientX, box.left, box.width, pixels.width);
      const expert = place(event.clientY, box.top, box.height, pixels.height);
      const [red, , blue, opacity] = pixels.data.slice(4 * (expert * pixels.width + column), 4 * (expert * pixels.width + column) + 4);
      const factor = Math.pow(reach, (red > blue ? 1 : -1) * opacity / 255);
      const end = opacity === 255 ? (red > blue ? "≥ " : "≤ ") : "";
      const first = column ? Number(steps[column - 1]) + 1 : Number(steps[0]);
      const last = Number(steps[column]);
      show([
        row(first < last ? "steps" : "step", first < last ? `${first}–${last}` : String(last)),
        row(`expert ${expert}`, `${end}${readable(+factor.toPrecision(2))} × the mean`),
      ], event.clientX, event.clientY);
    });
    picture.addEventListener("pointerleave", () => { tip.hidden = true; });
  }

  // A token's numbers come at once, instead of the browser's slow title.
  document.addEventListener("pointerover", (event) => {
    const token = event.target.closest ? event.target.closest(".said .t") : null;
    if (!token) {
      if (!event.target.closest || !event.target.closest(".chart svg, .map img")) tip.hidden = true;
      return;
    }
    if (token.title) {
      token.dataset.said = token.title;
      token.removeAttribute("title");
    }
    const rows = token.dataset.said.split(", ").map((part) => {
      const line = document.createElement("div");
      line.textContent = part;
      return line;
    });
    show(rows, event.clientX, event.clientY);
  });
})();
