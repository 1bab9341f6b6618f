// The runs of tiny, as the page shows them.

/** The readings of tiny that the page shows: unscaled, with the method, and with the remapping, on the story and a prompt. */
function ways(s) {
  const all = [["unscaled", {}, BASE, "4 3"]];
  if (s > 1 && state.method !== "none") all.push([state.method, { method: state.method, given: state.given }, look(state.method).colour, null]);
  if (s > 1 && $("live-map").checked) all.push([state.map, { map: state.map, mapGiven: state.model === "tiny" ? state.mapGiven : {} }, "var(--series-3)", "6 3"]);
  return all.flatMap(([name, settings, colour, dash]) => {
    try {
      return [{ name, colour, dash, way: tinyWay(s, settings) }];
    } catch {
      return [];
    }
  });
}

const prompt = () => TINY.prompts.find(({ length, depth }) => length === Number($("prompt-length").value) && depth === Number($("prompt-depth").value));

function drawTiny(rope) {
  if (!TINY) return;
  const s = state.length / rope.window, most = Math.min(TINY.tale.length, Math.max(256, Math.round((256 * s) / TINY.stretch) * TINY.stretch));
  const shown = ways(s), [base, ...others] = shown.map((one) => ({
    ...one, tale: taleReading(one.way, one.name === "unscaled" ? TINY.tale.length : most), answer: promptReading(one.way, prompt()),
  }));
  redraw = (share = 0) => showTiny([base, ...others], most, share);
  const order = [...others.map(({ tale }) => tale), base.tale, ...[...others, base].map(({ answer }) => answer)];
  clearTimeout(drawTiny.timer);
  drawTiny.timer = setTimeout(() => $("live").checked && want(order), 120);
  $("tiny-target").textContent = s > 1 ? `At ${count(s)} times its original length that is ${tokens(256 * s)} tokens${256 * s > most ? `, of which it processes ${tokens(most)}` : ""}.` : "";
  redraw();
}

function showTiny(readers, most, share) {
  const found = readers.map((one) => ({ ...one, losses: READINGS.get(one.tale.key)?.losses?.slice(0, most - 1), said: READINGS.get(one.answer.key) }));
  const missing = found.filter(({ losses, said }) => !losses || !said).length;
  $("progress").value = missing ? (2 * readers.length - found.reduce((sum, one) => sum + !one.losses + !one.said, 0) + share) / (2 * readers.length) : 1;
  $("progress-words").textContent = missing ? (running ? "running …" : "") : "done";
  const floor = TINY.floor.map((nats, k) => [(k + 0.5) * TINY.stretch, nats]).filter(([x]) => x < most);
  const lines = found.filter(({ losses }) => losses).map(({ name, colour, dash, losses }) => ({ name, colour, dash, width: name === state.method ? 3 : 2, points: byStretch(losses) }));
  const top = Math.max(2, ...lines.flatMap(({ points }) => points.map(([, y]) => y)));
  drawChart($("loss"), {
    label: `Loss of tiny by position: ${found.filter(({ losses }) => losses).map(({ name, losses }) => `${name} ${mean(losses.slice(-128)).toFixed(2)} nats at the end`).join(", ")}.`,
    x: { label: "position, tokens", domain: [0, most] }, y: { domain: [0, Math.min(top * 1.05, 14)] },
    lines: [...lines, { name: "floor", colour: "var(--faint)", dash: "2 3", width: 1.5, points: floor }], marks: [{ x: 256, text: "original length" }],
  });
  const end = found.filter(({ losses }) => losses).map(({ name, losses }) => `${escaped(name)} <b>${mean(losses.slice(-128)).toFixed(2)}</b>`);
  $("tiny-words").innerHTML = end.length ? `Loss of the last 128 of ${tokens(most)} tokens (nats/token): ${end.join(", ")}.` : "";
  $("passkey").tBodies[0].innerHTML = found.map(({ name, said }) => {
    if (!said) return `<tr><th scope="row">${escaped(name)}</th><td>…</td><td></td></tr>`;
    const { found: right, words } = verdict(prompt(), said);
    return `<tr><th scope="row">${escaped(name)}</th><td>${escaped(words)}</td><td><span class="${right ? "good" : "bad"}">${right ? "correct" : "wrong"}</span></td></tr>`;
  }).join("");
  const { ids, needle, question, answer } = prompt(), text = (a, b) => ids.slice(a, b).map((token) => TINY.words[token]).join("").trim();
  $("prompt").textContent = `Hidden: “${text(...needle)}” At the end: “${text(question, ids.length - answer)} …”`;
  for (const [id, one] of [["tale-before", found[0]], ["tale-after", found.find(({ name }) => name === state.method) ?? found[0]]])
    if ($(id).closest("details").open && one.losses) showTale($(id), one);
}

/** The story, once per run, at its end; a dashed line marks the original length. */
function showTale(host, { tale, losses }) {
  const shown = `${tale.key} ${losses.length}`;
  if (host.shown === shown) return;
  host.shown = shown;
  host.innerHTML = taleText(losses);
  host.scrollTop = host.scrollHeight;
}
