-- Puts dead letters back into the stream they came from, with the fields they came with. Each goes once, whoever asks.
-- The new entry carries how often the message was given up, in the field `attempts`.
--
-- KEYS   1 dead letters, 2 the stream
-- ARGV   ids of letters, all from that stream
-- Returns  the ids that were put back; the others are gone
local call = redis.call
local replayed = {}
for _, id in ipairs(ARGV) do
  local found = call('XRANGE', KEYS[1], id, id)
  if #found > 0 then
    local letter, fields, names = {}, {}, {}
    for i = 1, #found[1][2], 2 do
      local name = found[1][2][i]
      letter[name] = found[1][2][i + 1]
      names[#names + 1] = name
    end
    if letter['from'] ~= KEYS[2] then return redis.error_reply('ERR letter ' .. id .. ' is not from ' .. KEYS[2]) end
    for _, name in ipairs(names) do
      local original = string.match(name, '^field:(.*)$')
      if name == 't' or name == 'd' then original = name end
      if original and not string.find(' ' .. (letter['absent'] or '') .. ' ', ' ' .. name .. ' ', 1, true) then
        fields[#fields + 1] = original
        fields[#fields + 1] = letter[name]
      end
    end
    fields[#fields + 1] = 'attempts'
    fields[#fields + 1] = letter['attempts'] or 1
    call('XADD', KEYS[2], '*', unpack(fields))
    call('XDEL', KEYS[1], id)
    replayed[#replayed + 1] = id
  end
end
return replayed
