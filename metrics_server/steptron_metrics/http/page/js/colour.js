// Colours, computed in OKLCH (Ottosson's OKLab in polar form), where lightness is what the eye sees: ramps whose lightness
// rises evenly stay readable for every kind of colour vision and in grey.

/** sRGB [0, 255] of a colour; chroma is lowered until it can be shown. */
export function oklch(lightness, chroma, hue) {
  for (let c = chroma; ; c -= 0.004) {
    const rgb = toSrgb(lightness, Math.max(c, 0), hue);
    if (c <= 0 || rgb.every((part) => part >= -0.0005 && part <= 1.0005)) {
      return rgb.map((part) => Math.round(255 * Math.min(1, Math.max(0, part))));
    }
  }
}

function toSrgb(lightness, chroma, hue) {
  const a = chroma * Math.cos((hue * Math.PI) / 180);
  const b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((part) => (part <= 0.0031308 ? 12.92 * part : 1.055 * part ** (1 / 2.4) - 0.055));
}

const mix = (from, to, part) => from + (to - from) * part;

function ramp(at) {
  return Array.from({ length: 256 }, (_, index) => at(index / 255));
}

/** Ramps of 256 colours [r, g, b], dark to bright. */
export const RAMPS = {
  // Violet over teal to yellow.
  aurora: ramp((t) => oklch(mix(0.2, 0.95, t), mix(0.12, 0.17, t), mix(300, 102, t ** 1.15))),
  // Blue to yellow through grey: the same order for red-green colour blindness.
  ember: ramp((t) => oklch(mix(0.24, 0.94, t), 0.02 + 0.13 * Math.abs(t - 0.45) * 1.8, t < 0.45 ? 262 : 97)),
};

/** Blue, grey in the middle, orange: below and above a reference. */
export const DIVERGING = {
  light: ramp((t) => diverging(t, 0.95, 0.4, 0.52)),
  dark: ramp((t) => diverging(t, 0.27, 0.72, 0.78)),
};

function diverging(t, middle, blue, orange) {
  const away = Math.abs(t - 0.5) * 2;
  return oklch(mix(middle, t < 0.5 ? blue : orange, away ** 0.85), 0.19 * away ** 0.8, t < 0.5 ? 255 : 55);
}

/** A ramp as little-endian RGBA for ImageData; the entry after the last is for what was not measured. */
export function packed(colours, missing) {
  const table = new Uint32Array(257);
  [...colours, missing].forEach(([r, g, b], index) => { table[index] = (255 << 24) | (b << 16) | (g << 8) | r; });
  return table;
}

export const css = ([r, g, b], alpha = 1) => (alpha === 1 ? `rgb(${r} ${g} ${b})` : `rgb(${r} ${g} ${b} / ${alpha})`);

/** Okabe and Ito's palette, in an order whose first ones stand out on the background. */
const OKABE_ITO = {
  light: [[0, 114, 178], [213, 94, 0], [0, 158, 115], [204, 121, 167], [230, 159, 0], [86, 180, 233], [60, 60, 60]],
  dark: [[86, 180, 233], [230, 159, 0], [0, 186, 136], [222, 150, 190], [240, 228, 66], [235, 120, 40], [215, 215, 215]],
};

export function lineColour(index, theme) {
  const palette = OKABE_ITO[theme];
  return palette[index % palette.length];
}

/** The colour of a layer among others, by where it is between the first and the last. */
export function layerColour(part, theme) {
  return theme === "dark"
    ? oklch(mix(0.56, 0.9, part), 0.14, mix(290, 85, part))
    : oklch(mix(0.42, 0.72, part), 0.15, mix(290, 70, part));
}
