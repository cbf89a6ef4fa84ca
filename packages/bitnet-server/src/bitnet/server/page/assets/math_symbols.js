// The symbols of TeX's mathematics, by command: names and characters in turn.

const pairs = (text) => {
  const words = text.trim().split(/\s+/);
  return words.flatMap((word, nth) => (nth % 2 ? [] : [[word, words[nth + 1]]]));
};

/** Letters: shown as identifiers. */
export const LETTERS = new Map(pairs(`
alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν xi ξ
omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω
Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω
infty ∞ partial ∂ nabla ∇ hbar ℏ ell ℓ Re ℜ Im ℑ aleph ℵ wp ℘ emptyset ∅ varnothing ∅ imath ı jmath ȷ top ⊤ bot ⊥ angle ∠
square □ Box □ checkmark ✓ degree ° circledR ® ldots … dots … dotsc … cdots ⋯ dotsb ⋯ vdots ⋮ ddots ⋱ prime ′
`));

/** Operators, relations and arrows. */
export const OPERATORS = new Map(pairs(`
times × div ÷ pm ± mp ∓ cdot ⋅ ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗ oslash ⊘ odot ⊙ wedge ∧ land ∧ vee ∨ lor ∨
cap ∩ cup ∪ setminus ∖ sqcap ⊓ sqcup ⊔ amalg ⨿ dagger † ddagger ‡ neg ¬ lnot ¬ forall ∀ exists ∃ nexists ∄
leq ≤ le ≤ geq ≥ ge ≥ leqslant ⩽ geqslant ⩾ ll ≪ gg ≫ neq ≠ ne ≠ equiv ≡ approx ≈ sim ∼ simeq ≃ cong ≅ propto ∝ doteq ≐
prec ≺ succ ≻ preceq ⪯ succeq ⪰ subset ⊂ supset ⊃ subseteq ⊆ supseteq ⊇ subsetneq ⊊ in ∈ notin ∉ ni ∋ mid ∣ nmid ∤
parallel ∥ perp ⊥ vdash ⊢ dashv ⊣ models ⊨ asymp ≍ bowtie ⋈ triangle △ therefore ∴ because ∵
to → rightarrow → leftarrow ← gets ← leftrightarrow ↔ Rightarrow ⇒ implies ⟹ Leftarrow ⇐ impliedby ⟸ Leftrightarrow ⇔ iff ⟺
longrightarrow ⟶ longleftarrow ⟵ Longrightarrow ⟹ mapsto ↦ longmapsto ⟼ hookrightarrow ↪ uparrow ↑ downarrow ↓ Uparrow ⇑ Downarrow ⇓
nearrow ↗ searrow ↘ rightharpoonup ⇀ rightleftharpoons ⇌ colon : lbrace { rbrace } { { } } lbrack [ rbrack ] langle ⟨ rangle ⟩
lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ vert | lvert | rvert | Vert ‖ lVert ‖ rVert ‖ | ‖ backslash \\ % % $ $ # # & & _ _
`));

/** Operators that are large in formulas that stand alone; all but integrals have their limits above and below. */
export const LARGE = new Map(pairs(`
sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigvee ⋁ bigwedge ⋀ bigsqcup ⨆ int ∫ iint ∬ iiint ∭ oint ∮
`));

/** Functions by name; the second set has its limits below. */
export const FUNCTIONS = new Set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp deg dim hom ker arg".split(" "));
export const LIMITS = new Set("lim max min sup inf limsup liminf argmax argmin det gcd Pr".split(" "));

/** Signs above a letter; signs below. */
export const ABOVE = new Map(pairs("hat ^ widehat ^ bar ¯ overline ¯ vec → overrightarrow → dot ˙ ddot ¨ tilde ~ widetilde ~ check ˇ breve ˘ acute ´ grave ` overbrace ⏞"));
export const BELOW = new Map(pairs("underline _ underbrace ⏟"));

/** Widths of spaces, in em. */
export const SPACES = new Map([[",", 0.17], [":", 0.22], [">", 0.22], [";", 0.28], ["!", -0.17], [" ", 0.25], ["quad", 1], ["qquad", 2], ["thinspace", 0.17]]);

/** What goes around the tables of an environment. */
export const ENVIRONMENTS = new Map([
  ["matrix", ["", ""]], ["smallmatrix", ["", ""]], ["pmatrix", ["(", ")"]], ["bmatrix", ["[", "]"]], ["Bmatrix", ["{", "}"]], ["vmatrix", ["|", "|"]], ["Vmatrix", ["‖", "‖"]],
  ["cases", ["{", ""]], ["array", ["", ""]],
  ...["aligned", "align", "align*", "split", "gathered", "gather", "gather*", "equation", "equation*", "alignat", "multline"].map((name) => [name, ["", ""]]),
]);

// Alphabets: where capital and small letters, and digits, begin in Unicode, and the letters that are elsewhere.
export const ALPHABETS = new Map([
  ["mathbf", [0x1d400, 0x1d41a, 0x1d7ce, ""]], ["boldsymbol", [0x1d468, 0x1d482, 0x1d7ce, ""]], ["bm", [0x1d468, 0x1d482, 0x1d7ce, ""]],
  ["mathbb", [0x1d538, 0x1d552, 0x1d7d8, "CℂHℍNℕPℙQℚRℝZℤ"]],
  ["mathcal", [0x1d49c, 0x1d4b6, 0, "BℬEℰFℱHℋIℐLℒMℳRℛeℯgℊoℴ"]], ["mathscr", [0x1d49c, 0x1d4b6, 0, "BℬEℰFℱHℋIℐLℒMℳRℛeℯgℊoℴ"]],
  ["mathfrak", [0x1d504, 0x1d51e, 0, "CℭHℌIℑRℜZℨ"]], ["mathsf", [0x1d5a0, 0x1d5ba, 0x1d7e2, ""]], ["mathtt", [0x1d670, 0x1d68a, 0x1d7f6, ""]],
]);
