"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const LANE = 24, GAP = 4, TITLE = 24, AXIS = 26, PRINTED = 720;
  const STRIPED = ["wait", "turn"];
  const SOLID = ["forward", "backward", "input half", "weight half", "recomputation", "loss", "send", "exchange"];
  const MAIN = ["forward", "backward", "input half"];
  const slug = (name) => name.replaceAll(" ", "-");
  const byId = (id) => document.getElementById(id);

  // -- the theme ------------------------------------------------------------------------

  const root = document.documentElement, theme = byId("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const showTheme = () => {
    theme.textContent = isDark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
    theme.setAttribute("aria-pressed", String(isDark()));
  };
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  system.addEventListener("change", showTheme);
  showTheme();

  // -- the data -------------------------------------------------------------------------

  byId("download").addEventListener("click", () => {
    const text = byId("history-data").textContent;
    const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    const link = document.createElement("a");
    link.href = url;
    link.download = "run.json";
    link.click();
    URL.revokeObjectURL(url);
  });

  // -- the staircase --------------------------------------------------------------------

  const host = byId("lanes");
  if (!host) return;
  const data = JSON.parse(byId("staircase-data").textContent);
  const severalStages = data.stages.length > new Set(
    data.predicted.boxes.filter((b) => b[0] >= 0).map((b) => b[0])).size;

  const showSeconds = (s) => {
    if (s >= 0.1) return s >= 10 ? `${s.toFixed(1)} s` : `${s.toFixed(2)} s`;
    if (s >= 1e-4) return s >= 0.01 ? `${(1e3 * s).toFixed(1)} ms` : `${(1e3 * s).toFixed(2)} ms`;
    return `${(1e6 * s).toFixed(1)} us`;
  };
  const showMoment = (s) => (whole >= 1 ? `${s.toFixed(4)} s` : `${(1e3 * s).toFixed(2)} ms`);
  const element = (name, attributes, parent) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (parent) parent.append(made);
    return made;
  };

  const svg = element("svg", { tabindex: "0", role: "group" }, host);
  svg.setAttribute("aria-label", "A measured and a predicted step. Plus and minus zoom, arrows move, 0 shows all.");
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.setAttribute("role", "tooltip");
  tip.hidden = true;
  host.append(tip);

  let width = 0, left = 0, whole = 1, from = 0, to = 1, panels = [], boxes = [], current = null, frame = null;

  const describe = (box) => {
    const [worker, what, stage, microbatch, , seconds, awaited] = box.data;
    const name = STRIPED.includes(what) ? (what === "turn" ? "waits for its turn among replicas" : "waits") : what;
    const place = microbatch < 0 ? "" : ` of micro-batch ${microbatch} in stage ${stage}`;
    const lines = [];
    if (what === "wait" && microbatch >= 0) {
      lines.push(`waits to begin with micro-batch ${microbatch} in stage ${stage}`);
    } else {
      lines.push(`${name}${place}`);
    }
    lines.push(`${worker < 0 ? "the script" : `${data.workers[worker]}, ${data.devices[worker]}`}: ${showSeconds(seconds)}, from ${showMoment(box.start)}`);
    if (awaited && what === "wait") lines.push(`it waits for ${awaited}`);
    else if (awaited && MAIN.includes(what)) lines.push(`it needs the result of ${awaited}`);
    if (stage >= 0) {
      const [first, last] = data.stages[stage];
      lines.push(first === last ? `stage ${stage} is ${first}` : `stage ${stage} is ${first} to ${last}`);
    }
    return lines;
  };

  const dotted = [...new Set(data.records.flatMap((record) => record.boxes.map((b) => b[1])))]
    .filter((name) => !SOLID.includes(name) && !STRIPED.includes(name));

  const patterns = () => {
    const defs = element("defs", {}, svg);
    const stripes = element("pattern", { id: "stripes", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, defs);
    element("rect", { width: 7, height: 7, style: "fill: var(--quiet)" }, stripes);
    element("rect", { width: 2.5, height: 7, style: "fill: var(--grey)" }, stripes);
    for (const name of dotted) {
      const dots = element("pattern", { id: `dots-${slug(name)}`, class: `p-${slug(name)}`, width: 7, height: 7, patternUnits: "userSpaceOnUse" }, defs);
      element("rect", { width: 7, height: 7, style: "fill: var(--quiet)" }, dots);
      element("circle", { cx: 3.5, cy: 3.5, r: 1.6, style: "fill: var(--dot, var(--ink))" }, dots);
    }
  };

  const build = (record) => {
    svg.replaceChildren();
    patterns();
    const clip = element("clipPath", { id: "inside" }, svg.firstChild);
    clip.append(element("rect", {}));
    boxes = [];
    panels = [];
    current = null;
    tip.hidden = true;
    let top = 0;
    const sources = [
      { title: `Measured: ${record.name}`, boxes: record.boxes, offset: 0, script: true },
      { title: `Predicted: ${showSeconds(data.predicted.seconds)}`, boxes: data.predicted.boxes, offset: record.offset, script: false },
    ];
    whole = Math.max(record.seconds, record.offset + data.predicted.seconds) || 1;
    for (const source of sources) {
      const lanes = [...(source.script ? [-1] : []), ...data.workers.keys()];
      const panel = { top: top + TITLE, lanes: [], height: lanes.length * (LANE + GAP) };
      element("text", { class: "title", x: 0, y: top + 16 }, svg).textContent = source.title;
      for (const [place, worker] of lanes.entries()) {
        const y = panel.top + place * (LANE + GAP);
        const label = element("text", { x: 0, y: y + 16 }, svg);
        label.textContent = worker < 0 ? "script" : data.workers[worker];
        panel.lanes.push({ worker, y, back: element("rect", { class: "lane", y, height: LANE }, svg) });
      }
      panel.grid = element("g", { "clip-path": "url(#inside)" }, svg);
      panel.ticks = element("g", {}, svg);
      const group = element("g", { "clip-path": "url(#inside)" }, svg);
      for (const one of source.boxes) {
        const lane = panel.lanes.find((l) => l.worker === one[0]);
        if (!lane) continue;
        const what = one[1];
        const shape = element("rect", { class: `box p-${slug(what)}`, y: lane.y, height: LANE, tabindex: "-1", role: "img" }, group);
        if (STRIPED.includes(what)) shape.style.fill = "url(#stripes)";
        else if (!SOLID.includes(what)) shape.style.fill = `url(#dots-${slug(what)})`;
        const box = { data: one, start: one[4] + source.offset, end: one[4] + one[5] + source.offset, lane, shape, text: null, group };
        shape.setAttribute("aria-label", describe(box).join("; "));
        shape.addEventListener("pointerenter", () => showTip(box));
        shape.addEventListener("pointerleave", () => { if (document.activeElement !== shape) tip.hidden = true; });
        shape.addEventListener("focus", () => { reveal(box); drawFrame(); showTip(box); });
        shape.addEventListener("blur", () => { tip.hidden = true; drawFrame(); });
        boxes.push(box);
      }
      panels.push(panel);
      top = panel.top + panel.height + AXIS;
    }
    frame = element("rect", { class: "frame", height: LANE, visibility: "hidden" }, element("g", { "clip-path": "url(#inside)" }, svg));
    svg.dataset.height = top;
    setCurrent(boxes.find((b) => b.data[0] >= 0) || boxes[0]);
    legend(record);
    [from, to] = [0, whole];
    layout();
  };

  const legend = (record) => {
    const used = new Set([...record.boxes, ...data.predicted.boxes].map((b) => b[1]));
    const ordered = [...SOLID, ...STRIPED].filter((name) => used.has(name));
    const others = [...used].filter((name) => !ordered.includes(name)).sort();
    byId("kinds").replaceChildren(...[...ordered, ...others].map((name) => {
      const item = document.createElement("li"), swatch = document.createElement("i");
      swatch.className = `swatch p-${slug(name)}`;
      if (name === "turn") swatch.className = "swatch p-wait";
      item.append(swatch, name === "turn" ? "wait for other replicas" : name);
      return item;
    }));
  };

  const setCurrent = (box) => {
    if (current) current.shape.setAttribute("tabindex", "-1");
    current = box || null;
    if (current) current.shape.setAttribute("tabindex", "0");
  };

  const layout = (wide) => {
    width = wide || Math.max(200, host.clientWidth);
    left = 10 + 7.2 * Math.max(6, ...data.workers.map((name) => name.length));
    svg.setAttribute("viewBox", `0 0 ${width} ${svg.dataset.height}`);
    const inside = svg.querySelector("#inside rect");
    inside.setAttribute("x", left);
    inside.setAttribute("y", 0);
    inside.setAttribute("width", width - left);
    inside.setAttribute("height", svg.dataset.height);
    draw();
  };

  const x = (t) => left + ((t - from) / (to - from)) * (width - left);

  const tickStep = () => {
    const rough = (to - from) / Math.max(2, (width - left) / 90);
    const power = 10 ** Math.floor(Math.log10(rough));
    return power * ([1, 2, 5].find((k) => k * power >= rough) || 10);
  };

  const tickText = (t, step) => {
    const [factor, unit] = to >= 1 ? [1, "s"] : to >= 1e-3 ? [1e3, "ms"] : [1e6, "us"];
    const digits = Math.max(0, -Math.floor(Math.log10(step * factor) + 1e-9));
    return `${(t * factor).toFixed(digits)} ${unit}`;
  };

  const isInView = (box) => box.end > from && box.start < to;

  const draw = () => {
    svg.dataset.scale = (whole / (to - from)).toFixed(4);
    svg.dataset.from = from;
    const step = tickStep();
    for (const panel of panels) {
      panel.grid.replaceChildren();
      panel.ticks.replaceChildren();
      for (const lane of panel.lanes) {
        lane.back.setAttribute("x", left);
        lane.back.setAttribute("width", width - left);
      }
      for (let t = Math.ceil(from / step) * step; t <= to + 1e-12; t += step) {
        const at = x(t), bottom = panel.top + panel.height;
        element("line", { class: "grid-line", x1: at, x2: at, y1: panel.top, y2: bottom }, panel.grid);
        if (at > width - 26) continue;
        const anchor = at < left + 26 ? "start" : "middle";
        element("text", { class: "tick", x: at, y: bottom + 12, "text-anchor": anchor }, panel.ticks).textContent = tickText(t, step);
      }
    }
    for (const box of boxes) {
      const isSeen = isInView(box) || box.shape === document.activeElement;
      box.shape.style.display = isSeen ? "" : "none";
      if (!isSeen) {
        if (box.text) box.text.style.display = "none";
        continue;
      }
      const a = Math.max(left - 2, x(box.start)), b = Math.min(width + 2, x(box.end));
      box.shape.setAttribute("x", a.toFixed(2));
      box.shape.setAttribute("width", Math.max(0.8, b - a).toFixed(2));
      number(box, a, b);
    }
    if (current && !isInView(current) && current.shape !== document.activeElement) {
      const seen = boxes.filter(isInView);
      setCurrent(seen.find((b) => b.data[0] >= 0) || seen[0] || current);
    }
    drawFrame();
  };

  const drawFrame = () => {
    const isShown = current && current.shape === document.activeElement;
    frame.setAttribute("visibility", isShown ? "visible" : "hidden");
    if (!isShown) return;
    for (const name of ["x", "y", "width"]) frame.setAttribute(name, current.shape.getAttribute(name));
  };

  const number = (box, a, b) => {
    const [, what, stage, microbatch] = box.data;
    const label = microbatch < 0 ? "" : severalStages ? `${stage}.${microbatch}` : String(microbatch);
    const fits = label && SOLID.includes(what) && b - a > 3 + 6.5 * label.length;
    if (!fits) {
      if (box.text) box.text.style.display = "none";
      return;
    }
    if (!box.text) {
      box.text = element("text", { class: `number on-${slug(what)}`, y: box.lane.y + 16 }, box.group);
      box.text.textContent = label;
    }
    box.text.style.display = "";
    box.text.setAttribute("x", ((a + b) / 2).toFixed(2));
  };

  const showTip = (box) => {
    const [first, ...others] = describe(box);
    const heading = document.createElement("b");
    heading.textContent = first;
    tip.replaceChildren(heading, ...others.map((line) => {
      const made = document.createElement("span");
      made.textContent = line;
      return made;
    }));
    tip.hidden = false;
    const ratio = host.clientWidth / width;
    const middle = (Math.max(left, x(box.start)) + Math.min(width, x(box.end))) / 2 * ratio;
    const at = Math.max(0, Math.min(host.clientWidth - tip.offsetWidth, middle - tip.offsetWidth / 2));
    const below = (box.lane.y + LANE) * ratio + 6;
    const above = box.lane.y * ratio - tip.offsetHeight - 6;
    tip.style.left = `${at}px`;
    tip.style.top = `${below + tip.offsetHeight > host.clientHeight && above > 0 ? above : below}px`;
  };

  const view = (a, b) => {
    const span = Math.min(whole, Math.max(whole / 5000, b - a));
    from = Math.max(0, Math.min(whole - span, a));
    to = from + span;
    draw();
  };
  const zoom = (factor, at) => {
    const middle = at === undefined ? (from + to) / 2 : at;
    const span = Math.min(whole, Math.max(whole / 5000, (to - from) / factor));
    const share = (middle - from) / (to - from);
    view(middle - share * span, middle + (1 - share) * span);
  };
  const pan = (share) => view(from + share * (to - from), to + share * (to - from));
  const reveal = (box) => {
    setCurrent(box);
    if (!isInView(box)) {
      const span = to - from;
      view(box.start - span / 4, box.start + (3 * span) / 4);
    }
  };

  const DO = {
    in: () => zoom(1.5), out: () => zoom(1 / 1.5), left: () => pan(-0.2), right: () => pan(0.2),
    all: () => view(0, whole),
  };
  const KEYS = { "+": "in", "=": "in", "-": "out", "0": "all", ArrowLeft: "left", ArrowRight: "right" };

  const neighbour = (key) => {
    const same = boxes.filter((b) => b.lane === current.lane);
    const place = same.indexOf(current);
    if (key === "ArrowLeft") return same[place - 1];
    if (key === "ArrowRight") return same[place + 1];
    const lanes = panels.flatMap((panel) => panel.lanes).filter((lane) => boxes.some((b) => b.lane === lane));
    const lane = lanes[lanes.indexOf(current.lane) + (key === "ArrowUp" ? -1 : 1)];
    const distance = (b) => Math.max(0, b.start - current.start, current.start - b.end);
    return boxes.filter((b) => b.lane === lane).sort((p, q) => distance(p) - distance(q))[0];
  };

  svg.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const isInBoxes = event.target !== svg && current;
    if (event.key === "Escape") tip.hidden = true;
    else if (isInBoxes && event.key.startsWith("Arrow")) {
      const next = neighbour(event.key);
      if (next) {
        next.shape.style.display = "";
        next.shape.focus({ preventScroll: true });
      }
    } else if (KEYS[event.key]) {
      DO[KEYS[event.key]]();
      if (isInBoxes) showTip(current);
    } else return;
    event.preventDefault();
  });

  const timeAt = (event) => {
    const bounds = svg.getBoundingClientRect();
    const at = ((event.clientX - bounds.left) * width) / bounds.width;
    return from + (Math.max(0, at - left) / (width - left)) * (to - from);
  };
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !svg.contains(document.activeElement)) return;
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      pan((event.deltaX || event.deltaY) / 800);
    } else {
      zoom(Math.exp(-event.deltaY / 400), timeAt(event));
    }
  }, { passive: false });

  let drag = null;
  svg.addEventListener("pointerdown", (event) => {
    drag = { at: event.clientX, from, span: to - from };
    svg.focus({ preventScroll: true });
    event.preventDefault();
  });
  window.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const inside = ((width - left) * svg.getBoundingClientRect().width) / width;
    const start = drag.from - ((event.clientX - drag.at) / inside) * drag.span;
    tip.hidden = true;
    view(start, start + drag.span);
  });
  for (const name of ["pointerup", "pointercancel"]) window.addEventListener(name, () => { drag = null; });

  for (const button of document.querySelectorAll("[data-do]")) {
    button.addEventListener("click", () => DO[button.dataset.do]());
  }
  const chooser = byId("record");
  for (const [place, record] of data.records.entries()) chooser.append(new Option(record.name, place));
  chooser.value = data.chosen;
  chooser.addEventListener("change", () => build(data.records[chooser.value]));
  new ResizeObserver(() => { if (Math.abs(host.clientWidth - width) > 1) layout(); }).observe(host);
  window.addEventListener("beforeprint", () => layout(PRINTED));
  window.addEventListener("afterprint", () => layout());
  build(data.records[data.chosen]);
})();
