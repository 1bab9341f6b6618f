// Line charts in SVG.
const SVG = "http://www.w3.org/2000/svg", MARGIN = { top: 8, right: 12, bottom: 34, left: 50 };
const escaped = (text) => String(text).replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);

/** A number as an axis shows it: 1,024 or 131k, 0.05, 1e6. */
function shown(x) {
  const size = Math.abs(x);
  if (size >= 1e6) return `${+(x / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(x / 1e3).toPrecision(3)}k`;
  return size >= 100 ? Math.round(x).toLocaleString("en") : String(+x.toPrecision(3));
}

function ticks([low, high], log, count) {
  if (log) {
    const decades = Math.log10(high / low), first = Math.floor(Math.log10(low)), step = Math.ceil(decades / count);
    const within = decades < 0.8 * count ? (decades < 0.35 * count ? [1, 2, 4, 8] : [1, 3]) : [1];
    const powers = Array.from({ length: Math.ceil((decades + 2) / step) }, (_, k) => 10 ** (first + k * step));
    return powers.flatMap((power) => within.map((k) => k * power)).filter((x) => x >= low * 0.999 && x <= high * 1.001);
  }
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough) ?? power;
  const found = [];
  for (let x = Math.ceil(low / step - 1e-9) * step; x <= high + 1e-9 * step; x += step) found.push(+x.toPrecision(12));
  return found;
}

/** From numbers to places on a line of `size`, from `begin`. */
function scale([low, high], log, begin, size) {
  const of = log ? Math.log : (x) => x, from = of(low), span = of(high) - from || 1;
  return (x) => begin + ((of(x) - from) / span) * size;
}

/** The width of an element, kept until it changes: to read it between two drawings costs a layout of the page. */
const widths = new Map(), watcher = new ResizeObserver((all) => all.forEach(({ target, contentRect }) => widths.set(target, contentRect.width)));
function widthOf(host) {
  if (!widths.has(host)) {
    widths.set(host, host.clientWidth);
    watcher.observe(host);
  }
  return Math.max(240, widths.get(host) || 480);
}

/**
 * Draw lines into an element. `spec`: label (what it shows, for those who cannot see it), x and y ({label, domain,
 * log}), lines ({name, colour, points, faint, dash, width}), marks ({x or y, text}), bands ({x: [from, to], colour}).
 */
function drawChart(host, spec) {
  const width = widthOf(host), height = spec.height ?? clip(width * 0.56, 190, 300);
  const { x, y } = spec, inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
  const toX = scale(x.domain, x.log, MARGIN.left, inner.width), toY = scale(y.domain, y.log, height - MARGIN.bottom, -inner.height);
  const bottom = height - MARGIN.bottom, right = width - MARGIN.right, parts = [];
  for (const { x: [from, to], colour } of spec.bands ?? []) {
    const a = clip(toX(from), MARGIN.left, right), b = clip(toX(to), MARGIN.left, right);
    parts.push(`<rect x="${a.toFixed(1)}" y="${MARGIN.top}" width="${Math.max(0, b - a).toFixed(1)}" height="${inner.height}" fill="${colour}"/>`);
  }
  for (const tick of ticks(y.domain, y.log, 5)) {
    const at = toY(tick).toFixed(1);
    parts.push(`<path class="grid" d="M${MARGIN.left} ${at}H${right}"/><text x="${MARGIN.left - 6}" y="${at}" dy=".32em" text-anchor="end">${shown(tick)}</text>`);
  }
  for (const tick of ticks(x.domain, x.log, width < 420 ? 4 : 7))
    parts.push(`<text x="${toX(tick).toFixed(1)}" y="${bottom + 14}" text-anchor="middle">${shown(tick)}</text>`);
  parts.push(`<path class="axis" d="M${MARGIN.left} ${bottom}H${right}"/>`);
  parts.push(`<text class="name" x="${right}" y="${height - 4}" text-anchor="end">${escaped(x.label)}</text>`);
  for (const { x: place, y: level, text } of spec.marks ?? []) {
    if (place !== undefined && place >= x.domain[0] && place <= x.domain[1]) {
      const at = toX(place), left = at > width * 0.6;
      parts.push(`<path class="mark" d="M${at.toFixed(1)} ${MARGIN.top}V${bottom}"/><text class="name" x="${(at + (left ? -4 : 4)).toFixed(1)}" y="${MARGIN.top + 10}" text-anchor="${left ? "end" : "start"}">${escaped(text)}</text>`);
    }
    if (level !== undefined && level >= y.domain[0] && level <= y.domain[1]) {
      const at = toY(level).toFixed(1);
      parts.push(`<path class="mark" d="M${MARGIN.left} ${at}H${right}"/><text class="name" x="${MARGIN.left + 4}" y="${at - 4}">${escaped(text)}</text>`);
    }
  }
  parts.push(`<svg x="${MARGIN.left}" y="${MARGIN.top - 2}" width="${inner.width}" height="${inner.height + 4}" viewBox="${MARGIN.left} ${MARGIN.top - 2} ${inner.width} ${inner.height + 4}">`);
  for (const line of spec.lines) {
    let path = "", pen = false;
    for (const [a, b] of line.points) {
      if (!Number.isFinite(b) || (y.log && b <= 0)) { pen = false; continue; }
      path += `${pen ? "L" : "M"}${toX(a).toFixed(1)} ${clip(toY(b), -9999, 9999).toFixed(1)}`;
      pen = true;
    }
    parts.push(`<path class="line" d="${path}" stroke="${line.colour}" stroke-width="${line.width ?? 2}"${line.dash ? ` stroke-dasharray="${line.dash}"` : ""}/>`);
  }
  parts.push("</svg>");
  host.innerHTML = `<svg viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img" aria-label="${escaped(spec.label)}">${parts.join("")}<g class="cursor"></g></svg>${legend(spec)}`;
  follow(host.firstChild, spec, { toX, width, height });
}

const legend = ({ lines }) =>
  `<p class="legend">${lines.map((one) => `<span><i style="border-top:${one.width ?? 2}px ${one.dash ? "dashed" : "solid"} ${one.colour}"></i>${escaped(one.name)}</span>`).join("")}</p>`;

/** Under the pointer, the value of every line. */
function follow(svg, spec, { toX, width, height }) {
  const cursor = svg.querySelector(".cursor");
  svg.onpointerleave = () => (cursor.innerHTML = "");
  svg.onpointermove = (event) => {
    const box = svg.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width) * width;
    const nearest = (points) => points.reduce((best, point) => (Math.abs(toX(point[0]) - at) < Math.abs(toX(best[0]) - at) ? point : best));
    const rows = spec.lines.filter((line) => line.points.length).map((line) => [line, nearest(line.points)]);
    if (!rows.length) return;
    const place = toX(rows[0][1][0]), left = place > width / 2;
    const words = rows.map(([line, [, b]], k) => `<text x="${place + (left ? -8 : 8)}" y="${20 + 14 * k}" text-anchor="${left ? "end" : "start"}" style="fill:${line.colour}">${escaped(line.name)} ${shown(b)}</text>`);
    cursor.innerHTML = `<path class="mark" d="M${place} ${MARGIN.top}V${height - MARGIN.bottom}"/>${words.join("")}`;
  };
}
