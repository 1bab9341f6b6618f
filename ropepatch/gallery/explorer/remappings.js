// Position remappings: at which distance a query at m reads a key at n, as ropepatch/attention/remappings.py has them.
// L is the window, N the target. A band: keys from begin(m) to before end(m), seen from query(m) as if at key(n).
const TRAINED = 0.6; // the share of L whose distances a model knows well
const { floor, ceil, max, min } = Math;

const same = (x) => x, start = () => 0, at = (place) => () => place;
const behind = (distance) => (m) => m - distance + 1;
const near = (window) => ({ begin: behind(window), end: behind(0), query: same, key: same });
const far = (window, query, key) => ({ begin: start, end: behind(window), query, key });
const must = (holds, words) => {
  if (!holds) throw new Error(words);
};
const windowed = (p, L) => must(p.window < L, `window must be below ${L}`);

/** How lampe reads a position, and its R, b1 and b2. */
function lampeEnds({ length, mapped, head, tail }) {
  const span = max(1, length - 1), read = (x) => floor((mapped * x) / span);
  const step = ceil(((read(tail) + 1) * span) / mapped), end = min(step, length) - 1;
  const nearer = head - (read(head) + 1);
  return { read, end, nearer, farther: length - 1 - end - read(length - 1 - end) - nearer };
}

/** Of every remapping: its parameters for L and N, what they must be, how many tokens it reads, and its bands. */
const PLACES = {
  rerope: {
    derived: (L) => ({ window: max(1, floor(L / 2)) }),
    check: windowed,
    reach: () => Infinity,
    bands: (p) => [near(p.window), far(p.window, at(p.window), start)],
  },
  "leaky-rerope": {
    derived(L, N, p) {
      const window = p.window ?? max(1, floor(L / 2)), room = TRAINED * L - window;
      return { window, divisor: max(1 + 1e-6, (N - window) / (room > 0 ? room : L - window)) };
    },
    check: windowed,
    reach: (p, L) => floor(p.window + p.divisor * (L - p.window) + 1e-9),
    bands(p) {
      const shift = p.window - p.window / p.divisor;
      return [near(p.window), far(p.window, (m) => shift + m / p.divisor, (n) => n / p.divisor)];
    },
  },
  "self-extend": {
    derived(L, N, p) {
      const window = p.window ?? max(1, floor(L / 4)), room = TRAINED * L - window;
      if (window >= L) return { window, group: 1 };
      let group = ceil((N - window) / (room > 0 ? room : L - window));
      while (PLACES["self-extend"].reach({ window, group }, L) < N) group++;
      return { window, group };
    },
    check: windowed,
    reach: (p, L) => (L - p.window + floor(p.window / p.group)) * p.group,
    bands(p) {
      const shift = p.window - floor(p.window / p.group);
      return [near(p.window), far(p.window, (m) => floor(m / p.group) + shift, (n) => floor(n / p.group))];
    },
  },
  dca: {
    derived: (L) => ({ clip: max(1, floor((3 * L) / 4)), chunk: max(1, floor((5 * L) / 8)) }),
    check(p, L) {
      must(p.clip < L, `clip must be below ${L}`);
      must(p.chunk <= p.clip, `chunk must be at most ${p.clip}`);
    },
    reach: () => Infinity,
    bands({ clip: c, chunk: s }) {
      const back = (count) => (m) => (floor(m / s) - count) * s, key = (n) => n % s;
      return [
        { begin: back(0), end: behind(0), query: key, key },
        { begin: back(1), end: back(0), query: (m) => min((m % s) + s, c), key },
        { begin: start, end: back(1), query: at(min(2 * s - 1, c)), key },
      ];
    },
  },
  lampe: {
    derived: (L, N) => ({ length: N, mapped: max(1, floor(TRAINED * L)), head: max(1, floor(L / 8)), tail: max(1, floor(L / 20)) }),
    check(p, L) {
      must(p.mapped < L, `mapped must be below ${L}`);
      must(2 * p.head <= p.length, `head must be at most ${floor(p.length / 2)}`);
      must(p.head + p.tail < p.length, `tail must be below ${p.length - p.head}`);
    },
    reach(p, L) {
      const { read, nearer, farther } = lampeEnds(p);
      return max(p.length - 1 - farther, read(p.length - 1) + nearer) < L ? p.length : 0;
    },
    bands(p) {
      const { read, end, nearer, farther } = lampeEnds(p);
      const middle = behind(p.head + 1), last = behind(max(p.length - end, p.head + 1));
      return [
        { begin: middle, end: behind(0), query: same, key: same },
        { begin: last, end: middle, query: (m) => read(m) + nearer, key: read },
        { begin: start, end: last, query: (m) => m - farther, key: same },
      ];
    },
  },
  lambda: {
    derived: (L) => ({ window: max(1, floor((3 * L) / 4)), sinks: 4 }),
    check: windowed,
    reach: () => Infinity,
    bands(p) {
      const before = behind(p.window);
      return [near(p.window), { begin: start, end: (m) => min(before(m), p.sinks), query: at(p.window), key: start }];
    },
  },
  string: {
    derived(L, N, p) {
      const window = p.window ?? max(1, floor(L / 32));
      return { shift: max(1, min(max(floor(N / 3), N - L + window), L)), window };
    },
    check(p, L) {
      must(p.shift <= L, `shift must be at most ${L}`);
      must(p.window <= p.shift, `window must be at most ${p.shift}`);
    },
    reach: (p, L) => L + p.shift - p.window,
    bands: (p) => [near(p.shift), far(p.shift, (m) => m + p.window - p.shift, same)],
  },
};

/** All parameters of a remapping for L and N; what is given stands. */
const fitted = (name, L, N, given = {}) => ({ ...PLACES[name].derived(L, max(L, N), given), ...given });

/** Throws, with the reason, where parameters make no remapping of L that reads N tokens. */
function checkMap(name, p, L, N) {
  PLACES[name].check(p, L);
  const reach = PLACES[name].reach(p, L);
  must(reach >= N, `distances stay within ${L} up to ${reach} tokens, not ${N}`);
}

/** At which distance a query at m reads a key at n; NaN where it does not see it. */
function readAt(bands, m, n) {
  const band = bands.find((one) => n >= one.begin(m) && n < one.end(m));
  return band ? band.query(m) - band.key(n) : NaN;
}

/** The bands as tables over positions, for a reader of so many tokens. */
function tabulated(bands, tokens) {
  const table = (kind, of) => kind.from({ length: tokens }, (_, x) => of(x));
  return bands.map((band) => ({
    begin: table(Int32Array, (m) => max(0, band.begin(m))),
    end: table(Int32Array, (m) => max(0, band.end(m))),
    query: table(Float32Array, band.query),
    key: table(Float32Array, band.key),
  }));
}
const WHOLE = [{ begin: start, end: behind(0), query: same, key: same }];
