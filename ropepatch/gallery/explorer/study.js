// Measurements.

const called = (name) => (name === "none" ? "unscaled" : name);

/** A loss per stretch as a line of steps. */
const steps = (stretches, losses) => stretches.flatMap(([from, to], k) => [[from, losses[k]], [to, losses[k]]]);

function drawStudy() {
  const one = DATA.measured[Number($("study").value) || 0], { stretches, loss, trained, target } = one, byPlace = one.kind === "methods";
  const ranked = Object.keys(loss).sort((a, b) => loss[a].at(-1) - loss[b].at(-1));
  $("measured").parentElement.hidden = !byPlace;
  if (byPlace) {
    const drawn = ranked.filter((name) => state.drawn.includes(name) || name === state.method), all = drawn.flatMap((name) => loss[name]);
    const lines = drawn.map((name) => ({ name: called(name), ...look(name), points: steps(stretches, loss[name]) }));
    if (one.floor) lines.push({ name: "floor", colour: "var(--faint)", dash: "2 3", width: 1.5, points: steps(stretches, one.floor) });
    drawChart($("measured"), {
      label: `Measured losses of ${one.model} by position.`, lines, marks: [{ x: trained, text: "original length" }],
      x: { label: "position, tokens", domain: [0, target] }, y: { domain: [Math.min(...all, ...(one.floor ?? [])) * 0.9, Math.max(...all) * 1.1], log: true },
    });
  }
  drawStudyTable(one, ranked);
  $("measured-file").textContent = `From eval/results/${one.file}.`;
}

/** Losses by stretch, or within the original length and beyond it where these are many; passkeys by length. */
function drawStudyTable({ stretches, loss, trained, passkey, model: name }, ranked) {
  const over = (method, inside) => {
    const parts = stretches.map(([a, b], k) => [b - a, loss[method][k], b <= trained]).filter(([, , within]) => within === inside);
    return parts.reduce((sum, [n, nats]) => sum + n * nats, 0) / parts.reduce((sum, [n]) => sum + n, 0);
  };
  const columns = stretches.length <= 4 ? stretches.map(([a, b], k) => [`${tokens(a)} to ${tokens(b)}`, (method) => loss[method][k]])
    : [[`0 to ${tokens(trained)}`, (method) => over(method, true)], ["beyond", (method) => over(method, false)]];
  const lengths = [...new Set(Object.values(passkey).flatMap(Object.keys))].sort((a, b) => a - b);
  const heads = [...columns.map(([head]) => head), ...lengths.map(tokens)].map((head) => `<th scope="col" class="number">${head}</th>`);
  const groups = `<th scope="colgroup" class="group" colspan="${columns.length}">loss at tokens</th>${lengths.length ? `<th scope="colgroup" class="group" colspan="${lengths.length}">passkeys retrieved in</th>` : ""}`;
  $("measured-table").tHead.innerHTML = `<tr><th scope="col" rowspan="2">${escaped(name)}</th>${groups}</tr><tr>${heads.join("")}</tr>`;
  $("measured-table").tBodies[0].innerHTML = ranked.map((method) => {
    const cells = [...columns.map(([, value]) => value(method).toFixed(2)), ...lengths.map((n) => passkey[method]?.[n]?.join("/") ?? "–")];
    return `<tr${method === state.method ? ' class="chosen"' : ""}><th scope="row">${escaped(called(method))}</th>${cells.map((text) => `<td class="number">${text}</td>`).join("")}</tr>`;
  }).join("");
}
