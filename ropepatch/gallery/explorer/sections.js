// The parts of the page but the run of tiny and the measurements.
function drawControls(rope) {
  $("model").value = state.model;
  $("method").value = state.method;
  $("target").value = stepAt(state.length, rope.window);
  const words = `${tokens(state.length)} tokens, ${count(state.length / rope.window)} times the original length`;
  $("target").setAttribute("aria-valuetext", words);
  $("reach").textContent = `${tokens(rope.window)} → ${tokens(state.length)} tokens, ${count(state.length / rope.window)}×`;
}

/** Pairs from fast to slow for the dials, the chosen one among them. */
function shownPairs(n) {
  const few = [0, 0.35, 0.55, 0.75, 1].map((share) => Math.round(share * (n - 1)));
  return [...new Set([...few, state.pair])].sort((a, b) => a - b);
}

function drawStory(entry, rope, before, chosen, base) {
  const n = before.length, longer = state.length > rope.window, fate = longer
    ? `At ${tokens(state.length)} without scaling, ${inWords(base.unseen)} of its ${n} pairs reach angles never trained. With ${escaped(chosen.name)}: ${inWords(chosen.unseen)}.`
    : "Drag the target length beyond the original length.";
  $("story").innerHTML = `${escaped(entry.title)} was trained on ${tokens(rope.window)} tokens${rope.carried ? ", and already has RoPE scaling" : ""}. ${fate}`;
}

function drawAngles(rope, before, chosen) {
  const n = before.length, position = state.position * state.length;
  state.pair = clip(state.pair ?? Math.round(0.85 * (n - 1)), 0, n - 1);
  const pairs = shownPairs(n);
  drawDials($("dials"), pairs, pairs.indexOf(state.pair), before, chosen.frequencies, rope, state.length, position, chosen.name);
  drawStrip($("strip-before"), before, before, rope, state.length, state.pair);
  drawStrip($("strip-after"), before, chosen.frequencies, rope, state.length, state.pair);
  $("where").textContent = `${tokens(position)} of ${tokens(state.length)}`;
  $("position").value = Math.round(1000 * state.position);
  $("position").setAttribute("aria-valuetext", `position ${tokens(position)}`);
  Object.assign($("pair"), { max: n - 1, value: state.pair });
  const wave = TURN / before[state.pair], words = `pair ${state.pair + 1} of ${n}: a turn takes ${Number.isFinite(wave) ? tokens(wave) : "endless"} tokens`;
  $("pair-words").textContent = words;
  $("pair").setAttribute("aria-valuetext", words);
}

/** Distances from 1 to N, ever farther apart, and the width each stands for. */
function distancesTo(length) {
  const step = Math.log(length) / (POINTS - 1);
  return Array.from({ length: POINTS }, (_, k) => [Math.exp(k * step), 2.5 * Math.exp(k * step) * step]);
}

function drawMethods(rope, before, all) {
  const drawn = all.filter(({ name, error }) => !error && (state.drawn.includes(name) || name === state.method));
  const waves = wavelengths(before), lines = (points) => drawn.map((one) => ({ name: one.name, ...look(one.name), points: points(one) }));
  const s = state.length / rope.window, finite = waves.filter(Number.isFinite);
  const divisor = (one) => Array.from(one.frequencies, (f, i) => [waves[i], f ? before[i] / f : Infinity]);
  drawChart($("divisors"), {
    label: `Divisors of ${drawn.length} methods by wavelength, from 1 to ${count(s)} and more.`,
    x: { label: "tokens per turn before", domain: [Math.min(...finite), Math.max(...finite)], log: true },
    y: { domain: [0.8, Math.max(2, 1.6 * s)], log: true },
    lines: lines(divisor), marks: [{ x: rope.window, text: "original length" }, { y: s, text: `s = ${count(s)}` }],
  });
  const turned = (f, length) => (length * f) / TURN, low = Math.max(1e-4, turned(Math.min(...before.filter((f) => f > 0)), rope.window) / 2);
  const high = turned(before[0], state.length), few = Math.min(100, high);
  drawChart($("turns"), {
    label: "Turns of every pair within the target length, against its turns in training. Below one turn in training, a pair above the diagonal reaches angles never trained.",
    x: { label: "turns in training", domain: [low, few], log: true }, y: { domain: [low, few * 2], log: true },
    lines: [...lines((one) => Array.from(one.frequencies, (f, i) => [turned(before[i], rope.window), turned(f, state.length)]).filter(([x]) => x >= low && x <= few)), { name: "as far as in training", colour: "var(--faint)", width: 1, dash: "2 3", points: [[low, low], [few, few]] }],
    marks: [{ x: 1, text: "a full turn" }],
  });
  const places = distancesTo(state.length);
  drawChart($("alike"), {
    label: "Mean cosine of all pairs by distance, times the square of the attention factor.",
    x: { label: "distance, tokens", domain: [1, state.length], log: true }, y: { domain: [-0.3, 1.5] },
    lines: lines((one) => places.map(([d, width]) => [d, similarity(one.frequencies, one.a, d, width)])),
    marks: [{ x: rope.window, text: "original length" }],
  });
  drawMethodTable(rope, before, all);
}

/** Write into a cell what is not there yet: every write lays the table out again. */
function put(cell, html) {
  if (cell.written !== html) cell.innerHTML = cell.written = html;
}

function drawMethodTable(rope, before, all) {
  for (const [k, one] of all.entries()) {
    const row = $("methods").tBodies[0].rows[k], last = before.length - 1, cells = row.cells;
    row.classList.toggle("chosen", one.name === state.method);
    cells[0].firstChild.checked = state.drawn.includes(one.name) || one.name === state.method;
    cells[0].firstChild.disabled = Boolean(one.error) || one.name === state.method;
    const button = cells[1].querySelector("button");
    button.disabled = Boolean(one.error);
    button.setAttribute("aria-pressed", one.name === state.method);
    cells[1].querySelector("i").style.background = state.drawn.includes(one.name) || one.name === state.method ? look(one.name).colour : "transparent";
    if (one.error) {
      for (const [k, text] of [escaped(one.error), "–", "–"].entries()) put(cells[3 + k], text);
      continue;
    }
    const by = (i) => (one.frequencies[i] ? count(before[i] / one.frequencies[i]) : "stopped");
    put(cells[3], `${by(0)} to ${by(last)}`);
    put(cells[4], one.a.toFixed(3));
    put(cells[5], one.unseen ? `<span class="bad">${one.unseen} of ${before.length}</span>` : "none");
  }
}

function drawMap(rope) {
  const { window } = rope, length = Math.max(state.length, window + 1), p = fitted(state.map, window, length, state.mapGiven);
  $("map").value = state.map;
  $("map-words").textContent = `${state.map}: ${REMAPPINGS[state.map].formula}. ${REMAPPINGS[state.map].words}`;
  for (const input of $("map-parameters").querySelectorAll("input")) {
    input.max = Math.max(input.name === "group" || input.name === "divisor" ? 4 * Math.ceil(length / window) : 1, input.name === "length" ? length : window - 1, Math.ceil(p[input.name]));
    input.value = p[input.name];
    input.nextElementSibling.textContent = shown(p[input.name]);
    input.setAttribute("aria-valuetext", `${input.name} ${shown(p[input.name])}`);
  }
  let bands = WHOLE, problem = "";
  try {
    bands = PLACES[state.map].bands(p);
    checkMap(state.map, p, window, length);
  } catch (error) {
    problem = error.message;
  }
  const last = length - 1, points = Array.from({ length: POINTS + 1 }, (_, k) => Math.round((k / POINTS) * last)).map((d) => [d, readAt(bands, last, last - d)]);
  const farthest = Math.max(...points.map(([, d]) => d).filter(Number.isFinite)), unseen = points.some(([, d]) => Number.isNaN(d));
  $("map-problem").innerHTML = problem ? `<span class="bad">It does not fit</span>: ${escaped(problem)}.`
    : `The farthest key has the effective distance <span class="${farthest < window ? "good" : "bad"}">${tokens(farthest)}</span> of ${tokens(window)} trained${unseen ? "; most far keys are masked" : ""}.`;
  drawHeat($("heat-before"), WHOLE, window, length);
  $("heat-before").setAttribute("aria-label", `Heat map of distances for ${tokens(length)} tokens without remapping; the greatest is ${tokens(length - 1)}.`);
  drawHeat($("heat"), bands, window, length);
  $("heat").setAttribute("aria-label", `Heat map of distances for ${tokens(length)} tokens with ${state.map}; the greatest is ${tokens(farthest)}.`);
  drawChart($("curve"), {
    label: `Effective distances for the last query: at most ${tokens(farthest)} of ${tokens(last)}.`,
    x: { label: "true distance, tokens", domain: [0, last] }, y: { domain: [0, Math.min(last, 2 * window)] },
    bands: [], marks: [{ y: window, text: "original length: never trained above" }],
    lines: [{ name: "no remapping", colour: BASE, dash: "4 3", points: [[0, 0], [last, last]] }, { name: state.map, colour: COLOURS[0], width: 3, points }],
  });
}

function drawTake(entry, rope, chosen) {
  const longer = state.length > rope.window, saved = longer && chosen.name !== "none" ? configChanges(entry.config, rope, state.method, state.length, state.given) : null;
  $("command").textContent = !longer ? "# drag the target beyond the original length first" : chosen.name === "none" ? "# none changes nothing: choose a method" : command(entry.model, state.method, state.length, state.given);
  $("take-words").textContent = "The command writes a checkpoint that stock transformers loads. It changes no weights.";
  $("config-part").hidden = !saved;
  if (saved) $("config").textContent = jsonText(saved);
}

/** Parameters of a method or remapping as inputs; `set` is called with a name and a value, or undefined. */
function drawParameters(host, known, values, set, slider) {
  const { parameters, choices } = known;
  host.parentElement.hidden = !slider && !Object.keys(parameters).length;
  host.innerHTML = Object.entries(parameters).filter(([name]) => !slider || name !== "attention_factor").map(([name, usual]) => {
    const id = `${host.id}-${name}`, label = `<label for="${id}">${name}</label>`, value = values[name] ?? usual ?? "";
    if (slider) return `<div class="slide">${label}<input id="${id}" name="${name}" type="range" min="1" max="${1 << 21}" step="1"><output for="${id}"></output></div>`;
    if (typeof usual === "boolean" || choices[name]) {
      const all = choices[name] ?? ["true", "false"];
      return `<div>${label}<select id="${id}" name="${name}">${all.map((one) => `<option${String(value) === one ? " selected" : ""}>${one}</option>`).join("")}</select></div>`;
    }
    const text = typeof usual === "string";
    return `<div>${label}<input id="${id}" name="${name}" ${text ? `type="text" size="12"` : `type="number" step="any" placeholder="automatic"`} value="${escaped(value)}"></div>`;
  }).join("");
  host.oninput = ({ target }) => {
    const usual = parameters[target.name], text = target.value;
    const value = text === "" ? undefined : typeof usual === "boolean" ? text === "true" : typeof usual === "string" ? text : Number(text);
    set(target.name, value === usual ? undefined : value);
  };
}
