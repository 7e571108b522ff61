// From values to places.

/** A scale from [low, high] to [0, 1]. */
export function makeScale(low, high, logarithmic) {
  if (logarithmic) {
    const from = Math.log10(low);
    const span = Math.log10(high) - from || 1;
    return { low, high, logarithmic, at: (value) => (Math.log10(value) - from) / span, ticks: () => logTicks(low, high) };
  }
  const span = high - low || 1;
  return { low, high, logarithmic, at: (value) => (value - low) / span, ticks: (count) => ticks(low, high, count) };
}

/** Round numbers in [low, high], about so many. */
export function ticks(low, high, count = 5) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) {
    found.push(Number((index * step).toPrecision(12)));
  }
  return found;
}

function logTicks(low, high) {
  const from = Math.ceil(Math.log10(low) - 1e-9);
  const to = Math.floor(Math.log10(high) + 1e-9);
  const found = [];
  if (to - from >= 2) {
    const step = Math.ceil((to - from + 1) / 5);
    for (let power = from; power <= to; power += step) found.push(10 ** power);
    return found;
  }
  for (let power = from - 1; power <= to; power += 1) {
    for (const factor of [1, 2, 5]) {
      const value = Number((factor * 10 ** power).toPrecision(6));
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  return found.length >= 2 ? found : ticks(low, high, 4);
}

/** The scale for arrays of values: NaN and infinity left out, and what is not positive on a logarithmic one. */
export function scaleOf(arrays, logarithmic, room = 0.06) {
  let low = Infinity;
  let high = -Infinity;
  for (const values of arrays) {
    for (let index = 0; index < values.length; index += 1) {
      const value = values[index];
      if (!Number.isFinite(value) || (logarithmic && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low > high) return logarithmic ? makeScale(0.1, 10, true) : makeScale(0, 1, false);
  if (logarithmic) {
    const grow = Math.max((high / low) ** room, 1.08);
    return makeScale(low / grow, high * grow, true);
  }
  const grow = (high - low) * room || Math.abs(high) * 0.05 || 0.5;
  return makeScale(low >= 0 && low - grow < 0 ? 0 : low - grow, high + grow, false);
}
