-- Arguments of functions: their kinds, and the check that every function makes before anything else. What a function wrote before
-- an error stays, so no argument may be found wrong after the first write.

-- Kinds of arguments: their name in errors, and whether a text is one.
local TEXT = {is = 'a text', fits = function() return true end}
local INTEGER = {is = 'a whole number', fits = function(text) return string.match(text, '^%-?%d+$') and #text <= 17 end}
local NATURAL = {is = 'a whole number, 0 or more', fits = function(text) return string.match(text, '^%d+$') and #text <= 16 end}
local POSITIVE = {is = 'a whole number, 1 or more', fits = function(text) return NATURAL.fits(text) and tonumber(text) > 0 end}
local AMOUNT = {
  is = 'a whole number, at most a million', -- Redis refuses larger ones where it allocates for them
  fits = function(text) return NATURAL.fits(text) and tonumber(text) <= 1000000 end,
}
local FLAG = {is = '0 or 1', fits = function(text) return text == '0' or text == '1' end}
local ENTRY = {is = 'an entry of a stream', fits = function(text) return string.match(text, '^%d+%-%d+$') and #text <= 40 end}
local TICKET = {
  is = 'a ticket, <epoch>-<row>',
  fits = function(text)
    local epoch, row = string.match(text, '^(%d+)%-(%d+)$')
    return epoch and #epoch <= 9 and #row <= 9
  end,
}
local SHARE = {
  is = 'a number in 0..1',
  fits = function(text)
    local x = tonumber(text)
    return x and x >= 0 and x <= 1
  end,
}
local VARIATE = {
  is = 'a finite number above 0',
  fits = function(text)
    local x = tonumber(text)
    return x and x > 0 and x < math.huge
  end,
}
local MAYBE, EACH = {}, {} -- in a list of arguments: those after it may be missing; those after it may come any number of times

-- Return nil if the arguments are those that `expected` lists, by name and kind, otherwise the error to return. Every function
-- checks all of its arguments before its first write, because what it wrote before an error would stay.
local function invalid(name, expected, args)
  local at, again = 1, nil
  for i, text in ipairs(args) do
    if expected[at] == MAYBE then at = at + 1 end
    if expected[at] == EACH then again, at = at + 1, at + 1 end
    if at > #expected then
      if not again then return redis.error_reply('INVALID ' .. #args .. ' arguments for ' .. name .. ', more than it has') end
      at = again
    end
    if not expected[at + 1].fits(text) then
      return redis.error_reply('INVALID argument ' .. i .. ' of ' .. name .. ', ' .. expected[at] .. ': "' .. string.sub(text, 1, 60)
        .. '" is not ' .. expected[at + 1].is)
    end
    at = at + 2
  end
  if at <= #expected and expected[at] ~= MAYBE and expected[at] ~= EACH then
    return redis.error_reply('INVALID ' .. #args .. ' arguments for ' .. name .. ': ' .. expected[at] .. ' is missing')
  end
end
